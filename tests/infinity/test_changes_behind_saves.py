"""Weights that a program changes in place behind a save that reads them where they are kept: what
was changed before it was read is an error, and nothing takes the place of the save before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from checkpoint import ChangedTensorError
from checkpoint.saving.data_files import RankFiles
from infinity.model import training_of
from tests.support.early_reads import before_reads
from tests.support.models import Gpt, Stack, seeded, token_loss, vector_loss, vectors
from tests.support.training import WHOLE, least_budget, same_bits, values_of

CHANGED = "layers.3.weight"
Start = Callable[[infinity.OffloadedModel, Path], Any]
WAYS: dict[str, Start] = {
    "snapshot": lambda offloaded, _: offloaded.snapshot("one", block=False),
    "save": lambda offloaded, path: offloaded.save(path, block=False),
}


class Late:
    """Background saves read nothing before ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        before_reads(monkeypatch, self._wait)

    def _wait(self) -> None:
        assert self.go.wait(60)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    late = Late(monkeypatch)
    late.go.set()
    yield late
    late.go.set()


def _mul(model: Stack) -> None:
    with torch.no_grad():
        model.layer(3).weight.mul_(2)


def _initialise(model: Stack) -> None:
    nn.init.zeros_(model.layer(3).weight)


def _in_forward(model: Stack) -> None:
    """As ``nn.Embedding`` with ``max_norm`` does."""

    def change(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.get_parameter("weight").detach().mul_(2)

    handle = model.layer(3).register_forward_pre_hook(change)
    model(vectors(0))
    handle.remove()


CHANGES: dict[str, Callable[[Stack], None]] = {
    "mul": _mul,
    "init": _initialise,
    "in forward": _in_forward,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_changed_behind_a_save_is_named_and_the_one_before_stays(
    way: str, change: str, tmp_path: Path, late: Late
) -> None:
    nvme, path = tmp_path / "nvme", tmp_path / "saved"
    nvme.mkdir()
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
        with offloaded.gathered():
            before = model.layer(3).weight.detach().clone()
        WAYS[way](offloaded, path).result()
        vector_loss(model, 1).backward()
        offloaded.step()
        late.go.clear()
        pending = WAYS[way](offloaded, path)
        CHANGES[change](model)
        late.go.set()
        with pytest.raises(ChangedTensorError, match=r"gathered\(\[parameter\], modify") as raised:
            pending.result()
        assert raised.value.tensor == CHANGED
        with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
            offloaded.step()
        if way == "snapshot":
            offloaded.save(path, snapshot="one")
        offloaded.load(path)  # and everything goes on from there
        vector_loss(model, 1).backward()
        offloaded.step()
    assert same_bits(checkpoint.load(path)["model"][CHANGED], before)


@pytest.mark.parametrize("way", WAYS)
def test_a_change_that_was_told_before_a_save_has_read_is_in_no_save(
    way: str, tmp_path: Path, late: Late
) -> None:
    """Of several that are on their way none is published."""
    model = seeded(Stack)
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        late.go.clear()
        pending = [WAYS[way](offloaded, tmp_path / "one"), offloaded.save(tmp_path / "2", False)]
        _mul(model)
        with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
            offloaded.save(tmp_path / "3")
        late.go.set()
        for save in pending:
            with pytest.raises(ChangedTensorError, match=CHANGED):
                save.result()
        assert offloaded.snapshots() == []
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"one", "2", "3"})


def test_a_change_behind_a_save_is_an_error_of_the_block_and_of_the_log(
    tmp_path: Path, late: Late, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Stack)

    def block() -> None:
        with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
            offloaded.save(tmp_path / "saved", block=False).result()
            late.go.clear()
            offloaded.save(tmp_path / "changed", block=False)
            _mul(model)
            late.go.set()

    with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
        block()
    assert (tmp_path / "saved").is_dir()
    assert not (tmp_path / "changed").exists()
    assert "was changed while it was saved" in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_a_change_of_a_copy_behind_a_save_is_not_in_it(
    way: str, tmp_path: Path, late: Late
) -> None:
    """Weights on NVMe are changed where they are computed with; what is saved is elsewhere."""
    model, path = seeded(Stack), tmp_path / "saved"
    before = values_of(model)
    with infinity.offload(model, tmp_path, host_memory=least_budget(Stack, tmp_path)) as offloaded:
        late.go.clear()
        pending = WAYS[way](offloaded, path)
        _mul(model)
        late.go.set()
        pending.result()
        with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
            offloaded.step()
        if way == "snapshot":
            offloaded.save(path, snapshot="one")
            offloaded.drop_snapshot("one")
    assert same_bits(checkpoint.load(path)["model"][CHANGED], before[CHANGED])


def _change_in_vain(offloaded: infinity.OffloadedModel) -> None:
    with offloaded.gathered(modify=True):
        assert isinstance(offloaded.model, Stack)
        _mul(offloaded.model)
        raise KeyError("of the program")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_changed_in_gathered_and_lost_is_no_change_of_what_is_saved(
    way: str, tmp_path: Path, late: Late
) -> None:
    model, path = seeded(Stack), tmp_path / "saved"
    before = values_of(model)
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        late.go.clear()
        pending = WAYS[way](offloaded, path)
        with pytest.raises(KeyError):
            _change_in_vain(offloaded)
        late.go.set()
        pending.result()
        vector_loss(model, 0).backward()
        offloaded.step()
        if way == "snapshot":
            offloaded.save(path, snapshot="one")
            offloaded.drop_snapshot("one")
    assert same_bits(checkpoint.load(path)["model"][CHANGED], before[CHANGED])


@pytest.mark.parametrize("way", WAYS)
def test_a_change_that_ends_when_all_was_read_is_an_error_if_it_had_begun(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts a change when it has ended, and what is read meanwhile has a part of it."""
    model, counted, write = seeded(Stack), threading.Event(), RankFiles.sync
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:

        def sync_later(files: RankFiles) -> None:
            assert counted.wait(60)
            write(files)

        monkeypatch.setattr(RankFiles, "sync", sync_later)
        index = training_of(offloaded).index_of(model.layer(3).weight)
        with training_of(offloaded).in_place([index]):
            pending = WAYS[way](offloaded, tmp_path / "saved")
            pending.wait_staged()
            _mul(model)
        counted.set()
        with pytest.raises(ChangedTensorError, match=CHANGED):
            pending.result()
        with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
            offloaded.step()


@pytest.mark.parametrize("way", WAYS)
def test_steps_and_changes_behind_what_was_read_are_none_of_a_save(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a parameter that was in use when all had been read."""
    model, path, gone_on, write = seeded(Gpt), tmp_path / "s", threading.Event(), RankFiles.sync
    before = values_of(model)

    def sync_later(files: RankFiles) -> None:
        assert gone_on.wait(60)
        write(files)

    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        monkeypatch.setattr(RankFiles, "sync", sync_later)
        everything = range(len(training_of(offloaded).records))
        with training_of(offloaded).in_place(everything):
            pending = WAYS[way](offloaded, path)
            pending.wait_staged()
        token_loss(model, 0).backward()
        offloaded.step()
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        gone_on.set()
        pending.result()
        if way == "snapshot":
            offloaded.save(path, snapshot="one")
            offloaded.drop_snapshot("one")
    saved = checkpoint.load(path)["model"]
    assert all(same_bits(saved[name], value) for name, value in before.items())


def test_a_change_of_another_thread_beside_a_save_that_is_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And beside an export."""
    model, first = seeded(Stack), [True]

    def change_first() -> None:
        if first:
            first.pop()
            _mul(model)

    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        before_reads(monkeypatch, change_first)
        for write in (offloaded.save, offloaded.export):
            first[:] = [True]
            with pytest.raises(ChangedTensorError, match=CHANGED):
                write(tmp_path / "written")
            with pytest.raises(RuntimeError, match=rf"^{CHANGED} was changed in place"):
                offloaded.step()
            written = tmp_path / "written"
            assert not written.exists() or list(written.iterdir()) == []
