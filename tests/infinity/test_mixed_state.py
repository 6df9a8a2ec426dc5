"""A load, or another change of values, that was stopped leaves values of no one moment: everything
but replacing all of them is refused by name, until that has worked.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import infinity
from aio import AioError
from checkpoint import CorruptCheckpointError
from infinity.integrations.state_dicts import set_values
from swap.storage.components import ComponentStore
from swap.storage.extents import ExtentStore
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget, same_values, values_of

ADAMW = infinity.AdamW(lr=1e-2)
WIDTH = 160
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))


def _make() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def _train(offloaded: infinity.OffloadedModel, steps: int = 1) -> None:
    for _ in range(steps):
        offloaded.model(X).square().mean().backward()
        offloaded.step()


@pytest.fixture
def saved(nvme: Path, tmp_path: Path) -> Path:
    with infinity.offload(seeded(_make, 1), nvme, optimizer=ADAMW) as offloaded:
        _train(offloaded, 3)
        offloaded.save(tmp_path / "saved")
    return tmp_path / "saved"


def _expected(nvme: Path, saved: Path) -> dict[str, torch.Tensor]:
    model = seeded(_make, 2)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        offloaded.load(saved)
        _train(offloaded)
    return values_of(model)


@contextmanager
def _flipped(path: Path) -> Iterator[None]:
    """A bit of the data is another one inside."""
    (data,) = path.rglob("*.safetensors")
    where = data.stat().st_size // 2
    _flip(data, where)
    yield
    _flip(data, where)


def _flip(data: Path, where: int) -> None:
    with data.open("r+b") as file:
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ 1]))


def _stop_load(offloaded: infinity.OffloadedModel, saved: Path) -> None:
    with _flipped(saved), pytest.raises(CorruptCheckpointError):
        offloaded.load(saved)


Door = Callable[[infinity.OffloadedModel, Path], Any]
DOORS: dict[str, Door] = {
    "forward": lambda o, _: o.model(X),
    "parameter": lambda o, _: o.model[0].weight.detach(),  # type: ignore[index]
    "step": lambda o, _: o.step(),
    "backward": lambda o, _: o.backward(torch.zeros((), requires_grad=True)),
    "clip": lambda o, _: o.clip_grad_norm_(1.0),
    "flush": lambda o, _: o.flush(),
    "gathered": lambda o, _: o.gathered().__enter__(),
    "modify": lambda o, _: o.gathered(modify=True).__enter__(),
    "save": lambda o, path: o.save(path / "other"),
    "save behind": lambda o, path: o.save(path / "other", block=False),
    "export": lambda o, path: o.export(path / "other"),
    "snapshot": lambda o, _: o.snapshot("a"),
    "state_dict": lambda o, _: o.optimizer.state_dict(),
}


@pytest.mark.parametrize("is_least", [False, True])
def test_after_a_load_of_damaged_data_all_is_refused_until_one_has_worked(
    is_least: bool, saved: Path, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(_make, 2)
    host_memory = least_budget(_make, nvme, optimizer=ADAMW) if is_least else WHOLE
    with infinity.offload(model, nvme, optimizer=ADAMW, host_memory=host_memory) as offloaded:
        _train(offloaded)
        _stop_load(offloaded, saved)
        for name, door in DOORS.items():
            with pytest.raises(infinity.MixedStateError, match=r"CorruptCheckpoint.*load a") as e:
                door(offloaded, tmp_path)
            assert "0.weight" in e.value.parameters, name
        assert not (tmp_path / "other").exists()
        offloaded.load(saved)
        _train(offloaded)
    assert same_values(values_of(model), _expected(nvme, saved))


def test_block_that_ends_with_mixed_values_says_so_and_gives_none(saved: Path, nvme: Path) -> None:
    model = seeded(_make, 2)

    def run() -> None:
        with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
            _stop_load(offloaded, saved)
            raise KeyError("in flight")

    with pytest.raises(infinity.MixedStateError, match="CorruptCheckpointError") as caught:
        run()
    assert isinstance(caught.value.__context__, KeyError)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"0.weight has no values.*was stopped"):
        model(X)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        offloaded.load(saved)
        _train(offloaded)
    assert {p.device.type for p in model.parameters()} == {"cpu"}  # where it was at first


def test_interrupt_of_a_load_leaves_what_is_refused(saved: Path, nvme: Path) -> None:
    model = seeded(_make, 2)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        after = "infinity.values.loading.restore_scalars"
        with patch(after, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            offloaded.load(saved)
        with pytest.raises(infinity.MixedStateError, match="KeyboardInterrupt"):
            _train(offloaded)
        offloaded.load(saved)
        _train(offloaded)
    assert same_values(values_of(model), _expected(nvme, saved))


def test_load_that_changes_nothing_leaves_nothing_to_refuse(
    saved: Path, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(_make, 2)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        with pytest.raises(FileNotFoundError):
            offloaded.load(tmp_path / "nothing")
        (data,) = saved.rglob("*.safetensors")
        data.rename(data.with_suffix(".away"))
        with pytest.raises((OSError, ValueError)):
            offloaded.load(saved)
        _train(offloaded)


def test_checkpoint_without_what_is_mixed_is_refused(nvme: Path, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = seeded(_make, 1)
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    with infinity.offload(make(), nvme, optimizer=ADAMW) as offloaded:
        _train(offloaded)
        offloaded.save(tmp_path / "whole")
        offloaded.save(tmp_path / "trained", only_trainable=True)
        _stop_load(offloaded, tmp_path / "whole")
        with pytest.raises(infinity.MixedStateError, match=r"leaves 0.weight, 0.bias as it is"):
            offloaded.load(tmp_path / "trained")
        offloaded.load(tmp_path / "whole")
        _stop_load(offloaded, tmp_path / "trained")
        offloaded.load(tmp_path / "trained")
        _train(offloaded)


def test_snapshot_takes_the_place_of_what_is_mixed(saved: Path, tmp_path: Path) -> None:
    nvme = tmp_path / "disk"
    nvme.mkdir()
    with infinity.offload(seeded(_make, 2), nvme, optimizer=ADAMW) as offloaded:
        _train(offloaded)
        offloaded.snapshot("before")
        before = {n: p.detach().clone() for n, p in offloaded.model.named_parameters()}
        _stop_load(offloaded, saved)
        offloaded.restore("before")
        now = {n: p.detach().clone() for n, p in offloaded.model.named_parameters()}
        assert same_values(before, now)
        offloaded.drop_snapshot("before")


def test_change_that_the_disk_stops_as_it_is_taken_back_is_refused(nvme: Path) -> None:
    model = seeded(_make, 2)
    failure = AioError("cannot write", errno=errno.EIO)
    stopped = patch.object(ComponentStore, "write", side_effect=failure)

    def modify(offloaded: infinity.OffloadedModel) -> None:
        with offloaded.gathered(modify=True), torch.no_grad():
            model[1].weight.fill_(2)  # type: ignore[index]
            stopped.start()

    def run() -> None:
        with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
            with pytest.raises(AioError):
                modify(offloaded)
            stopped.stop()
            with pytest.raises(infinity.MixedStateError, match=r"gathered\(\).*1.weight") as e:
                offloaded.step()
            assert e.value.parameters == ["1.weight"]

    with pytest.raises(infinity.MixedStateError):
        run()
    assert [name for name, p in model.named_parameters() if p.is_meta] == ["1.weight"]


@pytest.mark.parametrize("max_parameter_bytes", [None, 256 << 10])
def test_change_that_a_full_disk_stops_beside_a_snapshot_leaves_what_there_was(
    tmp_path: Path, max_parameter_bytes: int | None
) -> None:
    """What it could write to no copy could not be taken back either, and counted as mixed."""
    make, allocate = partial(nn.Linear, 1024, 1024), ExtentStore.allocate
    left = 0 if max_parameter_bytes is None else 1  # of the copies that there is room for
    nvme = tmp_path / "disk"
    nvme.mkdir()

    def allocate_or_fail(store: ExtentStore, nbytes: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise AioError("full", errno=errno.ENOSPC, filename="state.swap")
        return allocate(store, nbytes)

    def change(offloaded: infinity.OffloadedModel) -> None:
        with offloaded.gathered(modify=True), torch.no_grad():
            model.weight.fill_(2)

    model, plain = seeded(make), seeded(make)
    least = least_budget(make, nvme, max_parameter_bytes=max_parameter_bytes)
    with infinity.offload(
        model, nvme, host_memory=least, max_parameter_bytes=max_parameter_bytes
    ) as o:
        o.snapshot("before")
        full = patch.object(ExtentStore, "allocate", allocate_or_fail)
        with full, pytest.raises(AioError, match="full"):
            change(o)
        assert left < 0
        with o.gathered():
            assert same_values(dict(model.state_dict()), dict(plain.state_dict()))
        change(o)
        with o.gathered():
            assert bool((model.weight == 2).all())
        o.drop_snapshot("before")


def test_interrupt_between_changes_that_are_taken_back_leaves_all_or_none(nvme: Path) -> None:
    model = seeded(_make, 2)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        taken = []
        write_back = offloaded._training.rank_context.write_back

        def interrupted(records: Any) -> None:
            write_back(records)
            taken.append(threading.current_thread() is threading.main_thread())

        patched = patch.object(offloaded._training.rank_context, "write_back", interrupted)
        with patched, offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2)
        assert taken == [False] * 8  # where no handler of signals runs


def test_values_of_a_state_dict_that_stop_in_the_middle_are_refused(nvme: Path) -> None:
    model = seeded(_make, 2)
    given = {name: value.detach().clone() for name, value in seeded(_make, 3).named_parameters()}

    class Given(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            value: torch.Tensor = super().__getitem__(name)
            if self.stops and name == "2.weight":
                self.stops = self.stops - 1
                if not self.stops:
                    raise KeyboardInterrupt
            return value

        stops = 0

    values = Given(given)
    with infinity.offload(model, nvme, optimizer=ADAMW) as offloaded:
        values.stops = 2  # the first is for its shape
        with pytest.raises(KeyboardInterrupt):
            set_values(offloaded, values, strict=True)
        with pytest.raises(infinity.MixedStateError, match="state dict"):
            _train(offloaded)
        set_values(offloaded, values, strict=True)
        offloaded.flush()
    assert same_values(values_of(model), given)
