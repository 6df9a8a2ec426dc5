"""Disks that go while a model trains: a named error, no hang, what is elsewhere can still be saved,
and training goes on from the last checkpoint on the disks that are left.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from aio import AioError
from swap.storage.drives.directory import reclaim
from tests.support.aio_loop import loop_mount, unavailable_reason
from tests.support.late_engine import Faults, Kind
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, train
from tests.support.tiers import late_engines
from tests.support.training import WHOLE, least_budget, same_values, values_of

STEPS, SAVED, GOES = 4, 1, 2
SWAP_FILE = r"state\.swap"
REASON = unavailable_reason()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


@pytest.fixture(scope="module")
def roomy(least: int) -> int:
    """With which gradients are in host memory, and the state is on NVMe."""
    return least + (5 << 20)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = seeded(Net)
    with _block(model, tmp_path_factory.mktemp("whole"), WHOLE) as offloaded:
        _train(offloaded, 0, STEPS)
    return values_of(model)


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for disk in made:
        disk.mkdir()
    return made


@pytest.fixture
def faults() -> Iterator[Faults]:
    made = Faults()
    with late_engines(1, made):
        yield made


def _block(model: Any, nvme: Any, host_memory: int) -> Any:
    return infinity.offload(model, nvme, host_memory=host_memory, optimizer=ADAMW)


def _train(offloaded: infinity.OffloadedModel, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        train(offloaded, step, step + 1)


def _lose(faults: Faults, disk: Path, kind: Kind, number: int) -> None:
    """From now on everything of that kind fails on one disk."""
    faults.arm(kind, number, times=1 << 30, matches=lambda r: disk in r.file.path.parents)


def _goes_on(nvme: Any, saved: Path, least: int) -> dict[str, Any]:
    """What a new block on other disks comes to, from the checkpoint."""
    model = seeded(Net)
    with _block(model, nvme, least) as offloaded:
        assert offloaded.load(saved) == SAVED
        _train(offloaded, SAVED, STEPS)
    return values_of(model)


@pytest.mark.parametrize("lost", [0, 1])
def test_disk_that_dies_is_named_and_the_checkpoint_goes_on_with_the_others(
    lost: int, disks: list[Path], faults: Faults, least: int, undisturbed: Any, tmp_path: Path
) -> None:
    model, saved = seeded(Net), tmp_path / "saved"

    def run() -> None:
        with _block(model, disks, least) as offloaded:
            _train(offloaded, 0, SAVED)
            offloaded.save(saved, extra=SAVED)
            offloaded.snapshot("last")
            _train(offloaded, SAVED, GOES)
            _lose(faults, disks[lost], "any", errno.EIO)
            with pytest.raises(AioError) as first:
                _train(offloaded, GOES, STEPS)
            for what in (offloaded.flush, lambda: offloaded.save(tmp_path / "other")):
                with pytest.raises(AioError, match=str(disks[lost])) as again:
                    what()
                assert again.value.errno == first.value.errno == errno.EIO
            assert not (tmp_path / "other").exists()

    with pytest.raises(infinity.RestoreError, match=str(disks[lost])) as unread:
        run()
    faults.disarm()
    unread.value.retry()  # or its threads and files stay for as long as it is kept
    left = disks[1 - lost]
    assert same_values(_goes_on(left, saved, least), undisturbed)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_step_is_finished_on_the_other_disk_where_one_takes_no_writes_any_more(
    number: int, disks: list[Path], faults: Faults, roomy: int, undisturbed: Any, tmp_path: Path
) -> None:
    model = seeded(Net)
    with _block(model, disks, roomy) as offloaded:
        _train(offloaded, 0, GOES)
        offloaded.flush()
        _lose(faults, disks[1], "write", number)
        _train(offloaded, GOES, GOES + 1)
        with suppress(AioError):  # none where it was an update ahead of the step that failed
            offloaded.flush()
        offloaded.flush()
        offloaded.save(tmp_path / "elsewhere", extra=GOES + 1)
        _train(offloaded, GOES + 1, STEPS)
    assert same_values(values_of(model), undisturbed)
    model = seeded(Net)
    with _block(model, disks[0], roomy) as offloaded:
        assert offloaded.load(tmp_path / "elsewhere") == GOES + 1
        _train(offloaded, GOES + 1, STEPS)
    assert same_values(values_of(model), undisturbed)


def test_spilled_gradients_that_cannot_be_written_are_let_go_and_values_saved_elsewhere(
    disks: list[Path], faults: Faults, least: int, undisturbed: Any, tmp_path: Path
) -> None:
    model = seeded(Net)
    with _block(model, disks, least) as offloaded:
        _train(offloaded, 0, SAVED)
        offloaded.flush()
        averages = [buffer.clone() for buffer in model.buffers()]
        _lose(faults, disks[1], "write", errno.EROFS)
        with pytest.raises(AioError, match=str(disks[1])):
            _train(offloaded, SAVED, STEPS)
        offloaded.optimizer.zero_grad()
        offloaded.flush()
        for buffer, value in zip(model.buffers(), averages, strict=True):
            buffer.copy_(value)  # which the forward pass has changed
        offloaded.save(tmp_path / "elsewhere", extra=SAVED)
    assert same_values(_goes_on(disks[0], tmp_path / "elsewhere", least), undisturbed)


def test_only_disk_that_takes_no_writes_any_more_is_named_until_the_block_ends(
    disks: list[Path], faults: Faults, roomy: int, undisturbed: Any, tmp_path: Path
) -> None:
    model, saved = seeded(Net), tmp_path / "saved"

    def run() -> None:
        with _block(model, disks[0], roomy) as offloaded:
            _train(offloaded, 0, SAVED)
            offloaded.save(saved, extra=SAVED)
            _train(offloaded, SAVED, GOES)
            offloaded.flush()
            _lose(faults, disks[0], "write", errno.EROFS)
            _train(offloaded, GOES, GOES + 1)
            for what in (
                offloaded.flush,
                lambda: offloaded.save(tmp_path / "other"),
                offloaded.flush,
            ):
                with pytest.raises(AioError, match=str(disks[0])):
                    what()

    with pytest.raises(infinity.RestoreError, match="values from before the last step") as unread:
        run()
    faults.disarm()
    unread.value.retry()  # or its threads and files stay for as long as it is kept
    assert same_values(_goes_on(disks[1], saved, roomy), undisturbed)


def _made_again(disk: Path) -> None:
    shutil.rmtree(disk)
    disk.mkdir()


def _taken_by_another(disk: Path) -> None:
    for lock in disk.glob(".infinity/*/lock"):
        lock.unlink()
    assert reclaim(disk)


GONE: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "removed, made again": _made_again,
    "renamed": lambda disk: disk.rename(disk.parent / "other name"),
    "its folder of swap files removed": lambda disk: shutil.rmtree(disk / ".infinity"),
    "reclaimed by another process": _taken_by_another,
}


@pytest.mark.parametrize("how", GONE)
def test_training_goes_on_where_the_swap_directory_is_gone(
    how: str, disks: list[Path], least: int, undisturbed: Any, tmp_path: Path
) -> None:
    """Open files stay what they are; what needs their names says so."""
    model, saved = seeded(Net), tmp_path / "saved"
    with _block(model, disks, least) as offloaded:
        _train(offloaded, 0, SAVED)
        GONE[how](disks[1])
        before = {*tmp_path.rglob("*")}
        offloaded.save(saved, extra=SAVED)
        with pytest.raises(FileNotFoundError, match=r"offloaded\.save") as refused:
            offloaded.snapshot("last")
        assert str(disks[1]) in str(refused.value)
        _train(offloaded, SAVED, STEPS)
    assert same_values(values_of(model), undisturbed)
    made = {path for path in tmp_path.rglob("*") if saved not in (path, *path.parents)}
    assert made <= before
    assert list(disks[0].iterdir()) == []


@pytest.mark.parametrize("how", [name for name in GONE if name != "reclaimed by another process"])
def test_later_snapshot_of_state_in_memory_is_refused_where_the_directory_is_gone(
    how: str, disks: list[Path], tmp_path: Path
) -> None:
    """No swap file is there to be missed, and what has its name now is not where the first is."""
    with _block(seeded(Net), disks, WHOLE) as offloaded:
        _train(offloaded, 0, SAVED)
        offloaded.snapshot("last")
        GONE[how](disks[0])
        before = {*tmp_path.rglob("*")}
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match=r"offloaded\.save") as refused:
                offloaded.snapshot("last")
            assert str(disks[0]) in str(refused.value)
        with pytest.raises(FileNotFoundError, match=r"offloaded\.save"):
            offloaded.snapshot("last", block=False).result()
    assert {*tmp_path.rglob("*")} <= before


@pytest.mark.root
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_training_goes_on_where_the_file_system_is_unmounted(
    disks: list[Path], least: int, undisturbed: Any, tmp_path: Path
) -> None:
    """Lazily, as is done to one in use: what is open stays, and no name leads there."""
    model = seeded(Net)
    with loop_mount(64 << 20) as mounted:
        subprocess.run(["mount", "--bind", mounted, disks[1]], check=True)
        with _block(model, disks, least) as offloaded:
            _train(offloaded, 0, SAVED)
            subprocess.run(["umount", "--lazy", disks[1]], check=True)
            offloaded.save(tmp_path / "saved", extra=SAVED)
            with pytest.raises(FileNotFoundError, match=str(disks[1])):
                offloaded.snapshot("last")
            assert not any(disks[1].iterdir())
            _train(offloaded, SAVED, STEPS)
        assert same_values(values_of(model), undisturbed)
        assert [*disks[0].iterdir(), *disks[1].iterdir()] == []
        assert len(list(mounted.glob(".infinity/*/state.swap"))) == 1
        with _block(seeded(Net), mounted, least):  # which reclaims it
            assert len(list(mounted.glob(".infinity/*/state.swap"))) == 1
        assert not (mounted / ".infinity").exists()


@pytest.mark.parametrize("nbytes", [0, 1 << 20])
def test_swap_file_that_is_cut_short_is_named(
    nbytes: int, disks: list[Path], least: int, undisturbed: Any, tmp_path: Path
) -> None:
    model, saved = seeded(Net), tmp_path / "saved"

    def run() -> None:
        with _block(model, disks[0], least) as offloaded:
            _train(offloaded, 0, SAVED)
            offloaded.save(saved, extra=SAVED)
            (file,) = disks[0].glob(".infinity/*/state.swap")
            with file.open("r+b") as opened:
                opened.truncate(nbytes)
            with pytest.raises(OSError, match=SWAP_FILE):
                _train(offloaded, SAVED, STEPS)
            with pytest.raises(OSError, match=SWAP_FILE):
                offloaded.save(tmp_path / "other")

    with pytest.raises(OSError, match=SWAP_FILE):
        run()
    assert same_values(_goes_on(disks[1], saved, least), undisturbed)
