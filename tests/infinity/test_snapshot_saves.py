"""Snapshots that are saved as checkpoints while training goes on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from infinity.snapshots import points
from infinity.snapshots.reading import SavedPoint
from tests.support.damage import flip_every_page
from tests.support.models import seeded
from tests.support.proof import by_turns
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train
from tests.support.training import WHOLE, least_budget


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


def _block(nvme: Path, host_memory: int, seed: int = 0, **options: Any) -> Any:
    return infinity.offload(
        seeded(Net, seed), nvme, host_memory=host_memory, **({"optimizer": ADAMW} | options)
    )


OPTIMIZERS: dict[str, Any] = {
    "bfloat16": {"compute_dtype": torch.bfloat16},
    "8-bit": {"optimizer": infinity.AdamW(lr=1e-2, state_dtype=torch.uint8)},
    "tiled": {"max_parameter_bytes": "320KiB"},
}


@pytest.mark.parametrize(("kind", "is_whole"), by_turns(OPTIMIZERS, [True, False]))
def test_checkpoint_of_a_snapshot_is_that_of_the_moment_it_was_taken(
    kind: str, is_whole: bool, nvme: Path, tmp_path: Path
) -> None:
    options = {"optimizer": ADAMW} | OPTIMIZERS[kind]
    dtype = options.get("compute_dtype")
    host_memory = WHOLE if is_whole else least_budget(Net, nvme, **options)
    with _block(nvme, host_memory, **options) as offloaded:
        torch.manual_seed(3)
        train(offloaded, 0, 2, dtype)
        offloaded.snapshot("a", extra={"epoch": 2})
        before = everything(offloaded)
        offloaded.save(tmp_path / "then", extra={"epoch": 2})
        train(offloaded, 2, 4, dtype)
        after = everything(offloaded)
        info = offloaded.save(tmp_path / "now", snapshot="a")
        pending = offloaded.save(tmp_path / "behind", block=False, snapshot="a")
        assert_same(after, everything(offloaded))
        train(offloaded, 4, 5, dtype)
        pending.result()
        offloaded.drop_snapshot("a")
    names = checkpoint.list_tensors(tmp_path / "then")
    for name in ("now", "behind"):
        assert checkpoint.list_tensors(tmp_path / name) == names
    assert info.path == tmp_path / "now"
    with _block(nvme, WHOLE, seed=9, **options) as offloaded:
        for name in ("now", "behind"):
            assert offloaded.load(tmp_path / name) == {"epoch": 2}
            assert_same(before, everything(offloaded))
            train(offloaded, 2, 4, dtype)
            assert_same(after, everything(offloaded))


def test_a_snapshot_that_is_being_saved_is_neither_replaced_nor_dropped_before(
    least: int, nvme: Path, tmp_path: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        before = everything(offloaded)
        pending = offloaded.save(tmp_path / "replaced", block=False, snapshot="a")
        train(offloaded, 1, 2)
        offloaded.snapshot("a")
        assert pending.done()
        dropped = offloaded.save(tmp_path / "dropped", block=False, snapshot="a")
        offloaded.drop_snapshot("a")
        assert dropped.done()
        offloaded.load(tmp_path / "replaced")
        assert_same(before, everything(offloaded))
        for number in range(4):
            offloaded.snapshot(f"s{number}", keep=2)
            offloaded.save(tmp_path / f"s{number}", block=False, snapshot=f"s{number}")
            train(offloaded, number + 2, number + 3)
        offloaded.flush()
    with _block(nvme, least, seed=9) as offloaded:
        offloaded.load(tmp_path / "s0")
        assert_same(before, everything(offloaded))
        for point in offloaded.snapshots():
            offloaded.drop_snapshot(point.name)


def test_snapshots_are_saved_one_after_the_other(least: int, nvme: Path, tmp_path: Path) -> None:
    """Each takes memory beside the budget of the tiers."""
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        offloaded.snapshot("b")
        first = offloaded.save(tmp_path / "a", block=False, snapshot="a")
        second = offloaded.save(tmp_path / "b", block=False, snapshot="b")
        assert first.done()
        second.result()
        offloaded.drop_snapshot("a")
        offloaded.drop_snapshot("b")


@pytest.mark.parametrize("snapshot", [None, "a"])
def test_error_of_a_save_is_raised_by_the_end_of_the_block_also_if_a_snapshot_came_behind_it(
    snapshot: str | None, least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()

    def no_room(*_: object) -> None:
        raise OSError(28, "no room")

    def save_behind() -> None:
        with _block(nvme, least) as offloaded:
            train(offloaded, 0, 1)
            offloaded.snapshot("a")
            with monkeypatch.context() as patch:
                patch.setattr("checkpoint.saving.commit.write_files", no_room)
                offloaded.save(tmp_path / "full", block=False, snapshot=snapshot).wait_done()
            offloaded.snapshot("b")

    with pytest.raises(OSError, match="no room"):
        save_behind()
    with _block(nvme, least) as offloaded:
        offloaded.drop_snapshot("a")
        offloaded.drop_snapshot("b")


def test_the_end_of_the_block_waits_for_the_save_of_a_snapshot_and_tells_its_error(
    least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        pending = offloaded.save(tmp_path / "saved", block=False, snapshot="a")
    assert pending.done()
    assert checkpoint.verify(tmp_path / "saved").ok

    def fail(*_: object) -> None:
        raise OSError(5, "the disk is gone")

    def save_behind() -> None:
        with _block(nvme, least, seed=9) as offloaded:
            offloaded.save(tmp_path / "other", block=False, snapshot="a")

    monkeypatch.setattr(SavedPoint, "fill", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        save_behind()
    assert not (tmp_path / "other" / "manifest.json").exists()
    with _block(nvme, least) as offloaded:
        offloaded.drop_snapshot("a")


def test_what_is_damaged_of_a_snapshot_is_not_saved(least: int, nvme: Path, tmp_path: Path) -> None:
    verified = least_budget(Net, nvme, optimizer=ADAMW, verify_swap=True)
    with _block(nvme, verified, verify_swap=True) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        (kept,) = nvme.rglob("snapshots-*/*/*.swap")
        flip_every_page(kept)
        with pytest.raises(infinity.CorruptSwapError):
            offloaded.save(tmp_path / "saved", snapshot="a")
        assert not (tmp_path / "saved" / "manifest.json").exists()
        flip_every_page(kept)
        offloaded.save(tmp_path / "saved", snapshot="a")
        offloaded.drop_snapshot("a")


def test_what_cannot_be_saved_of_a_snapshot_is_refused(nvme: Path, tmp_path: Path) -> None:
    with _block(nvme, WHOLE) as offloaded:
        with pytest.raises(FileNotFoundError, match="no snapshot a"):
            offloaded.save(tmp_path / "saved", snapshot="a")
        with pytest.raises(ValueError, match="extra"):
            offloaded.save(tmp_path / "saved", snapshot="a", extra=1)
        with pytest.raises(ValueError, match="only_trainable"):
            offloaded.save(tmp_path / "saved", snapshot="a", only_trainable=True)
        with pytest.raises(ValueError, match="no name of a snapshot"):
            offloaded.save(tmp_path / "saved", snapshot="../a")
    assert list(tmp_path.iterdir()) == [nvme]


def test_snapshot_that_another_thread_would_drop_while_it_is_saved_is_saved_whole(
    least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = vars(points)["save_now"]
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        before = everything(offloaded)
        offloaded.snapshot("a")
        other = threading.Thread(target=offloaded.drop_snapshot, args=("a",))

        def save_while_it_is_dropped(*to: Any) -> Any:
            other.start()
            other.join(0.1)  # it would be done, if it were let
            with ThreadPoolExecutor(1) as pool:  # on this thread it would be within the save
                pool.submit(train, offloaded, 2, 6).result()
            return save(*to)

        monkeypatch.setattr(points, "save_now", save_while_it_is_dropped)
        offloaded.save(tmp_path / "saved", snapshot="a")
        other.join()
        assert offloaded.snapshots() == []
        offloaded.load(tmp_path / "saved")
        assert_same(before, everything(offloaded))


def test_weights_of_a_snapshot_are_had_in_the_way_that_errors_tell(
    nvme: Path, tmp_path: Path
) -> None:
    with _block(nvme, WHOLE) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        expected = {name: p.detach().clone() for name, p in offloaded.model.named_parameters()}
    (folder,) = nvme.glob(".infinity/snapshots-*/*/points/a")
    with pytest.raises(ValueError, match=r"offloaded\.save\(path, snapshot='a'\)"):
        _block(nvme, WHOLE, weights=folder).__enter__()
    with _block(nvme, WHOLE, optimizer=torch.optim.SGD) as offloaded:
        with pytest.raises(ValueError, match=r"offloaded\.save\(path, snapshot=name\)"):
            offloaded.restore("a")
        offloaded.save(tmp_path / "of a", snapshot="a")
        offloaded.drop_snapshot("a")
    options = {"optimizer": torch.optim.SGD, "weights": tmp_path / "of a"}
    with _block(nvme, WHOLE, seed=1, **options) as offloaded:
        pass
    found = dict(offloaded.model.named_parameters())
    assert all(torch.equal(found[name], values) for name, values in expected.items())
