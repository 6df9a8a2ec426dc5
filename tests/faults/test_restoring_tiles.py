"""Weights in tiles of which some cannot be finished or read: ``retry`` gives them their values, and
``load_state_dict`` others.
"""

import errno
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import infinity
from aio import AioError
from infinity import restoring
from swap.storage.components import ComponentStore
from swap.update.stages import Stages
from tests.support.damage import fail
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import same_bits

WIDTH = 512
TILED: dict[str, Any] = {"max_parameter_bytes": "256KiB"}


def _made() -> Stack:
    return seeded(lambda: Stack(width=WIDTH, depth=2))


def _step(model: Stack, offloaded: infinity.OffloadedModel) -> None:
    vector_loss(model, 0, width=WIDTH).backward()
    offloaded.step()


def test_step_of_tiles_that_cannot_be_finished_is_finished_by_the_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0, 0.0))
    expected, model = _made(), _made()
    with pytest.raises(infinity.BudgetError) as least:
        infinity.offload(model, tmp_path, host_memory=1, **TILED).__enter__()
    options = TILED | {"host_memory": least.value.least_host_bytes}
    with infinity.offload(expected, tmp_path, **options) as other:
        _step(expected, other)

    def is_full(*_: Any) -> None:
        raise AioError("full", errno=errno.ENOSPC, filename="state.swap")

    with (
        patch.object(Stages, "start_write", is_full),
        pytest.raises(infinity.RestoreError, match="values from before the last step") as caught,
        infinity.offload(model, tmp_path, **options) as offloaded,
    ):
        _step(model, offloaded)
    assert any(".tiles." in name for name in caught.value.parameters)
    with (
        pytest.raises(ValueError, match=r"tiles.* RestoreError .*retry\(\) first"),
        infinity.offload(model, tmp_path, **options),
    ):
        pytest.fail("a block began without the trained values")
    caught.value.retry()
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert same_bits(found[name], value), name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["to_empty", "load"])
def test_tiles_that_could_not_be_read_get_values_in_the_ways_that_are_named(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0,))
    expected, model = _made(), _made()
    with infinity.offload(_made(), tmp_path, **TILED) as offloaded:
        offloaded.save(tmp_path / "saved")
    with (
        patch.object(ComponentStore, "read", fail),
        pytest.raises(infinity.RestoreError),
        infinity.offload(model, tmp_path, **TILED),
    ):
        pass
    gc.collect()
    with pytest.raises(
        RuntimeError, match=r"to_empty and .*, or another block with offloaded\.load"
    ):
        model.get_parameter("layers.0.tiles.0.weight").detach()
    if way == "to_empty":
        model.to_empty(device="cpu")
        model.load_state_dict(expected.state_dict())
    for each in (model, expected):
        with infinity.offload(each, tmp_path, **TILED) as offloaded:
            if way == "load":
                offloaded.load(tmp_path / "saved")
            _step(each, offloaded)
    for name, value in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], value), name
