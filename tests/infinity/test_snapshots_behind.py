"""Snapshots that become durable behind training: of which moment they are, and who waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from aio import AioError
from infinity.model import training_of
from infinity.snapshots import points
from infinity.snapshots.sources import HostBytes
from infinity.values.component_bytes import ComponentBytes
from swap.storage.extents import ExtentStore
from tests.support.early_reads import before_reads
from tests.support.models import seeded
from tests.support.snapshot_runs import (
    ADAMW,
    Net,
    assert_restored,
    assert_same,
    block_of,
    everything,
    shallow,
    train,
)
from tests.support.training import WHOLE, least_budget

MIB = 1 << 20
_block = partial(block_of, shallow)


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(shallow, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


def _assert_kept(offloaded: Any, before: dict[str, Any], extra: object = None) -> None:
    """The snapshot "a" is of that; it is dropped."""
    assert_restored(offloaded, before, extra=extra)
    offloaded.drop_snapshot("a")


class Gate:
    """Keeps snapshots from being published until ``open``: ``reached`` is set by the first that
    comes there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        keep_files = vars(points)["keep_files"]

        def keep_later(*arguments: Any) -> None:
            self.reached.set()
            assert self._opened.wait(60)
            keep_files(*arguments)

        monkeypatch.setattr(points, "keep_files", keep_later)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.mark.parametrize(
    ("home", "dtype", "beyond"),
    [
        ("nvme", torch.bfloat16, 0),
        ("mixed", None, 6 * MIB),
        ("mixed", torch.bfloat16, 4 * MIB),
        ("host", None, WHOLE),
    ],
)
def test_snapshot_behind_training_is_of_the_moment_of_the_call(
    home: str, dtype: torch.dtype | None, beyond: int, nvme: Path, gate: Gate
) -> None:
    """None is published before three more steps are taken and finished."""
    options: dict[str, Any] = {"compute_dtype": dtype, "optimizer": ADAMW}
    options["host_memory"] = least_budget(Net, nvme, **options) + beyond
    extra = {"seen": [1]}
    with infinity.offload(seeded(Net), nvme, **options) as offloaded:
        placement = training_of(offloaded).state.placement
        assert (placement.state_nvme_bytes > 0) == (home != "host")
        assert (placement.state_host_bytes > MIB) == (home != "nvme")
        torch.manual_seed(3)
        train(offloaded, 0, 2, dtype)
        before = everything(offloaded)
        pending = offloaded.snapshot("a", extra=extra, block=False)
        extra["seen"].append(2)
        offloaded.optimizer.param_groups[0]["lr"] = 0.5
        train(offloaded, 2, 5, dtype)
        offloaded.flush()
        assert gate.reached.wait(60)
        assert pending.staged()
        assert not pending.done()
        assert offloaded.snapshots() == []
        after = everything(offloaded)
        gate.open()
        assert offloaded.snapshots() in ([], [pending.result()])
        assert offloaded.snapshots() == [pending.result()]
        assert_same(after, everything(offloaded))
        assert_restored(offloaded, before, extra={"seen": [1]})
    with infinity.offload(seeded(Net, 7), nvme, **options) as offloaded:
        _assert_kept(offloaded, before, extra={"seen": [1]})


@pytest.mark.parametrize("change", ["step", "modify", "load", "restore"])
def test_host_memory_changes_only_once_a_snapshot_has_read_it(
    change: str, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing before somebody waits for it, or all is changed."""
    waited = threading.Event()

    def late() -> None:
        assert waited.wait(60)

    def noting(wait: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            waited.set()
            return wait(*arguments)

        return noted

    for name in ("wait_staged", "wait_done"):
        wait = getattr(checkpoint.PendingSave, name)
        monkeypatch.setattr(checkpoint.PendingSave, name, noting(wait))
    with _block(nvme, WHOLE) as offloaded:
        offloaded.save(tmp_path / "first")
        offloaded.snapshot("first")
        train(offloaded, 0, 2)
        before = everything(offloaded)
        waited.clear()
        before_reads(monkeypatch, late)
        pending = offloaded.snapshot("a", block=False)
        if change == "step":
            train(offloaded, 2, 3)
        elif change == "modify":
            with offloaded.gathered(modify=True), torch.no_grad():
                for parameter in offloaded.model.parameters():
                    parameter.add_(1.0)
        elif change == "load":
            offloaded.load(tmp_path / "first")
        else:
            offloaded.restore("first")
        assert waited.is_set()
        pending.result()
        assert_restored(offloaded, before)
        for name in ("a", "first"):
            offloaded.drop_snapshot(name)


@pytest.mark.parametrize("way", ["snapshot", "save"])
def test_what_is_in_host_memory_is_written_from_where_it_lies(
    way: str, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No source is read into memory of its own, which takes time from the cores that compute."""

    def read(*_: object) -> None:
        raise AssertionError("it was read")

    with _block(nvme, WHOLE) as offloaded:
        train(offloaded, 0, 1)
        before = everything(offloaded)
        for kind in (HostBytes, ComponentBytes):
            monkeypatch.setattr(kind, "read", read)
        if way == "snapshot":
            offloaded.snapshot("a", block=False).result()
        else:
            offloaded.save(tmp_path / "saved", block=False).result()
        monkeypatch.undo()
        train(offloaded, 1, 2)
        if way == "snapshot":
            _assert_kept(offloaded, before)
        else:
            offloaded.load(tmp_path / "saved")
            assert_same(before, everything(offloaded))


def test_buffers_and_extra_state_change_behind_a_snapshot_and_not_in_it(
    least: int, nvme: Path, gate: Gate
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        before = everything(offloaded)
        offloaded.snapshot("a", block=False)
        offloaded.model(torch.randn(8, 256))  # running averages
        offloaded.model.norm.running_mean.fill_(9.0)
        gate.open()
        _assert_kept(offloaded, before)


def test_snapshot_of_the_same_name_stays_until_the_new_one_is_durable(
    least: int, nvme: Path, gate: Gate
) -> None:
    gate.open()
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        first = offloaded.snapshot("a", extra=1)
        gate._opened.clear()
        train(offloaded, 1, 2)
        before = everything(offloaded)
        pending = offloaded.snapshot("a", extra=2, block=False)
        train(offloaded, 2, 4)
        assert offloaded.snapshots() == [first]
        gate.open()
        assert [pending.result()] == offloaded.snapshots() != [first]
        state = training_of(offloaded).state
        assert state.extents is not None
        del first
        _assert_kept(offloaded, before, extra=2)
        used = state.placement.state_nvme_bytes + state.placement.gradient_nvme_bytes
        assert state.extents.used_bytes == used


def test_surplus_goes_when_the_new_one_is_durable_and_not_before(
    least: int, nvme: Path, gate: Gate
) -> None:
    gate.open()
    with _block(nvme, least) as offloaded:
        for number in range(3):
            train(offloaded, number, number + 1)
            offloaded.snapshot(f"s{number}", keep=2, block=False)
        offloaded.snapshot("s3", keep=2)
        gate._opened.clear()
        pending = offloaded.snapshot("s4", keep=1, block=False)
        assert [one.name for one in offloaded.snapshots()] == ["s2", "s3"]
        gate.open()
        pending.result()
        assert [one.name for one in offloaded.snapshots()] == ["s4"]
        offloaded.drop_snapshot("s4")


@pytest.mark.parametrize("call", ["snapshot", "behind", "restore", "drop", "save", "load"])
def test_call_waits_for_the_snapshot_that_is_on_its_way(
    call: str, least: int, nvme: Path, tmp_path: Path, gate: Gate
) -> None:
    gate.open()
    with _block(nvme, least) as offloaded:
        offloaded.snapshot("old")
        offloaded.save(tmp_path / "saved")
        calls = {
            "snapshot": lambda: offloaded.snapshot("b"),
            "behind": lambda: offloaded.snapshot("b", block=False),
            "restore": lambda: offloaded.restore("old"),
            "drop": lambda: offloaded.drop_snapshot("old"),
            "save": lambda: offloaded.save(tmp_path / "point", snapshot="a"),
            "load": lambda: offloaded.load(tmp_path / "saved"),
        }
        gate._opened.clear()
        gate.reached.clear()
        pending = offloaded.snapshot("a", block=False)
        assert gate.reached.wait(60)
        opening = threading.Timer(0.05, gate.open)
        opening.start()
        other = calls[call]()
        assert pending.done()
        opening.join()
        if isinstance(other, infinity.PendingSnapshot):
            assert other.result().name == "b"
        for one in offloaded.snapshots():
            offloaded.drop_snapshot(one.name)


def test_end_of_the_block_waits_for_the_snapshot_that_is_on_its_way(
    least: int, nvme: Path, gate: Gate
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        before = everything(offloaded)
        pending = offloaded.snapshot("a", block=False)
        train(offloaded, 2, 3)
        threading.Timer(0.05, gate.open).start()
    assert pending.done()
    assert pending.result().step == 2
    with _block(nvme, least, seed=5) as offloaded:
        assert offloaded.snapshots() == [pending.result()]
        _assert_kept(offloaded, before)


def test_checkpoint_that_is_saved_of_a_snapshot_is_not_dropped_with_it(
    least: int, nvme: Path, tmp_path: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        before = everything(offloaded)
        offloaded.snapshot("a", block=False)
        saved = offloaded.save(tmp_path / "saved", snapshot="a", block=False)
        for number in range(3):
            train(offloaded, number + 1, number + 2)
            offloaded.snapshot(f"s{number}", keep=1, block=False)
        saved.result()
        offloaded.snapshot("last", keep=1)
        assert [one.name for one in offloaded.snapshots()] == ["last"]
        offloaded.load(tmp_path / "saved")
        assert_same(before, everything(offloaded))
        offloaded.drop_snapshot("last")


def test_result_times_out_and_says_so_while_it_is_on_its_way(
    least: int, nvme: Path, gate: Gate
) -> None:
    with _block(nvme, least) as offloaded:
        pending = offloaded.snapshot("a", block=False)
        assert pending.name == "a"
        assert pending.wait_staged(60)
        assert not pending.wait_done(0.01)
        with pytest.raises(TimeoutError, match="has not ended"):
            pending.result(0.01)
        gate.open()
        assert pending.result(60).name == "a"
        offloaded.drop_snapshot("a")
        assert pending.result().name == "a"


@pytest.mark.parametrize("call", ["snapshot", "save"])
def test_call_that_saves_behind_training_puts_no_weights_in_place(
    call: str, nvme: Path, tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights on NVMe would be read for it, under a lock that an interrupted pass may hold."""
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.flush()
        used: list[object] = []
        residency = training_of(offloaded).residency
        real = residency.in_place

        def in_place(indices: Any, frame: Any) -> Any:
            used.extend(indices)
            return real(indices, frame)

        monkeypatch.setattr(residency, "in_place", in_place)
        if call == "snapshot":
            offloaded.snapshot("a", block=False).result()
            offloaded.drop_snapshot("a")
        else:
            offloaded.save(tmp_path / "run", block=False).result()
        assert not used
        offloaded.model.up.weight.sum()
        assert used


@pytest.mark.parametrize("block", [True, False])
def test_snapshot_where_weights_cannot_be_read_is_taken(
    block: bool, nvme: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what is in swap files, and does not read it."""

    def fail(*_: object, **__: object) -> None:
        raise AioError("unread", errno=errno.EIO, filename="state.swap")

    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        before = everything(offloaded)
        with monkeypatch.context() as patch:
            patch.setattr(ExtentStore, "read", fail)
            _take(offloaded, block=block)
        train(offloaded, 2, 3)
        _assert_kept(offloaded, before)


@pytest.mark.parametrize("block", [True, False])
def test_snapshot_of_a_swap_file_that_was_cut_short_is_refused(
    block: bool, nvme: Path, least: int
) -> None:
    """It could not be restored, and one of that name that could stays."""
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        _take(offloaded, block=True)
        before = everything(offloaded)
        train(offloaded, 2, 3)
        later = everything(offloaded)
        (file,) = nvme.glob(".infinity/*/state.swap")
        content = file.read_bytes()
        os.truncate(file, 4096)
        with pytest.raises(AioError, match="has 4096 bytes, and a snapshot needs the first"):
            _take(offloaded, block=block)
        file.write_bytes(content)
        assert_same(later, everything(offloaded))
        _assert_kept(offloaded, before)


def _take(offloaded: infinity.OffloadedModel, *, block: bool) -> None:
    taken = offloaded.snapshot("a", block=block)
    if isinstance(taken, infinity.PendingSnapshot):
        taken.result()
