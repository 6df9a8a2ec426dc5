"""Host memory goes as a block ends, or an optimizer is closed, whoever still refers to it."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from aio import buffers
from tests.support.training import WHOLE, least_budget


def make() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])


def _mappings() -> list[Any]:
    return [slab._mapping for slab in list(buffers._slabs) if slab._mapping is not None]


@contextmanager
def _lets_go() -> Iterator[list[weakref.ref[Any]]]:
    """Of all that is mapped when what it gives is filled, nothing is when the block ends."""
    gc.collect()
    others = {id(mapping): mapping for mapping in _mappings()}
    known: list[weakref.ref[Any]] = []
    yield known
    gc.collect()
    assert not [one for one in known if one() is not None and id(one()) not in others]


def _note(known: list[weakref.ref[Any]]) -> None:
    known.extend(weakref.ref(mapping) for mapping in _mappings())
    assert known


def _train(model: nn.Module) -> None:
    model(torch.ones(2, 256)).square().mean().backward()


OPTIMIZERS = {"ours": infinity.AdamW(), "torch": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("budget", ["least", "whole"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
@pytest.mark.parametrize("activations", ["keep", "nvme"])
def test_a_block_that_has_ended_keeps_no_memory_while_its_handle_is_there(
    budget: str, optimizer: str | None, activations: Any, tmp_path: Path
) -> None:
    """Programs have `offloaded`, its optimizer and a scheduler over that up to their end."""
    chosen = None if optimizer is None else OPTIMIZERS[optimizer]
    options: dict[str, Any] = {"optimizer": chosen, "activations": activations}
    host_memory = WHOLE if budget == "whole" else least_budget(make, tmp_path, **options)
    model = make().requires_grad_(chosen is not None)
    with _lets_go() as known:
        with infinity.offload(model, tmp_path, host_memory=host_memory, **options) as offloaded:
            if chosen is None:
                model(torch.ones(2, 256))
            else:
                handle = offloaded.optimizer
                schedule = torch.optim.lr_scheduler.StepLR(handle, 1)
                _train(model)
                offloaded.step()
                schedule.step()
            offloaded.snapshot("last")
            offloaded.drop_snapshot("last")
            _note(known)
        assert offloaded.model is model
    if chosen is not None:
        handle.zero_grad()  # as loops do behind their last step
        schedule.step()
    for use in (offloaded.step, offloaded.report, offloaded.flush, offloaded.gathered):
        with pytest.raises(RuntimeError, match="not offloaded any more"):
            use()


@pytest.mark.parametrize("host_memory", ["6656KiB", "64MiB"])
def test_an_optimizer_that_is_closed_keeps_no_memory(host_memory: str, tmp_path: Path) -> None:
    model = make()
    with _lets_go() as known:
        with infinity.OffloadedAdamW(
            model.parameters(), nvme=tmp_path, host_memory=host_memory
        ) as optimizer:
            _train(model)
            optimizer.step()
            state = optimizer.state[model.get_parameter("0.weight")]
            _note(known)
        optimizer.close()
    assert optimizer.report().steps == 1
    with pytest.raises(RuntimeError, match="is closed"):
        state["exp_avg"]
