"""Snapshots beside everything else that changes state, and in blocks of another kind."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

import checkpoint
import infinity
from infinity.model import training_of
from infinity.snapshots import points
from tests.support.models import seeded
from tests.support.proof import matrix
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train
from tests.support.training import WHOLE, least_budget, same_values, values_of


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), optimizer=ADAMW)


def _block(nvme: Any, host_memory: int, seed: int = 0, **options: Any) -> Any:
    return infinity.offload(
        seeded(Net, seed), nvme, host_memory=host_memory, **({"optimizer": ADAMW} | options)
    )


def _modify(offloaded: infinity.OffloadedModel, folder: Path) -> None:
    with offloaded.gathered(modify=True), torch.no_grad():
        for parameter in offloaded.model.parameters():
            parameter.add_(1.0)


def _load(offloaded: infinity.OffloadedModel, folder: Path) -> None:
    offloaded.load(folder / "saved")


@pytest.mark.parametrize("change", [_modify, _load])
def test_values_that_are_overwritten_after_a_snapshot_are_not_those_of_the_snapshot(
    change: Callable[[infinity.OffloadedModel, Path], None],
    least: int,
    nvme: Path,
    tmp_path: Path,
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.save(tmp_path / "saved")
        train(offloaded, 1, 3)
        offloaded.snapshot("a")
        before = everything(offloaded)
        change(offloaded, tmp_path)
        changed = everything(offloaded)
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        change(offloaded, tmp_path)
        assert_same(changed, everything(offloaded))
    with _block(nvme, least, seed=5) as offloaded:
        offloaded.restore("a")
        change(offloaded, tmp_path)
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        offloaded.drop_snapshot("a")


_TILED = {"max_parameter_bytes": "256KiB"}


@pytest.mark.parametrize(
    ("taken", "restored"),
    matrix(
        [
            ({}, {"host_memory": WHOLE}),
            ({"host_memory": WHOLE}, {}),
            ({}, _TILED),
            (_TILED, {"host_memory": WHOLE}),
            (_TILED, _TILED),
        ],
        usual=[({"host_memory": WHOLE}, {}), (_TILED, {"host_memory": WHOLE})],
    ),
)
def test_snapshot_is_restored_under_other_budgets_and_tiles(
    taken: dict[str, Any], restored: dict[str, Any], least: int, nvme: Path, tmp_path: Path
) -> None:
    usual: dict[str, Any] = {"optimizer": ADAMW, "host_memory": least}
    model = seeded(Net)
    with infinity.offload(model, nvme, **(usual | taken)) as offloaded:
        torch.manual_seed(2)
        train(offloaded, 0, 3)
        offloaded.snapshot("a")
        offloaded.save(tmp_path / "taken")
        train(offloaded, 3, 5)
    expected = values_of(model)
    other = seeded(Net, 8)
    with infinity.offload(other, nvme, **(usual | restored)) as offloaded:
        offloaded.restore("a")
        offloaded.save(tmp_path / "restored")
        train(offloaded, 3, 5)
        offloaded.drop_snapshot("a")
    assert same_values(_tensors(tmp_path / "taken"), _tensors(tmp_path / "restored"))
    # Of other tiles the products are others, which are rounded otherwise on some processors.
    if taken.get("max_parameter_bytes") == restored.get("max_parameter_bytes"):
        assert same_values(expected, values_of(other))


def _of_first_version(folder: Path) -> None:
    """Save a snapshot over as the first version of its format had it."""
    tree = checkpoint.load(folder)
    tree["point"]["format"] = 1
    tables = json.loads(tree.pop("tables")["json"])
    tree["leaves"] = tables.pop("leaves")
    tree["training"] |= tables
    tree["contents"]["parameters"] = json.loads(tree["contents"]["parameters"])
    checkpoint.save(tree, folder)


def _of_damaged_tables(folder: Path) -> None:
    tree = checkpoint.load(folder)
    tree["tables"]["json"] = tree["tables"]["json"][:-1]
    checkpoint.save(tree, folder)


def test_snapshot_of_the_first_version_is_restored_and_one_of_no_tables_refused(
    least: int, nvme: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("a")
        expected = everything(offloaded)
    (folder,) = nvme.rglob("points/a")
    _of_first_version(folder)
    with _block(nvme, least, seed=4) as offloaded:
        assert [snapshot.name for snapshot in offloaded.snapshots()] == ["a"]
        offloaded.restore("a")
        assert_same(expected, everything(offloaded))
        train(offloaded, 2, 3)
        offloaded.snapshot("b")
        before = everything(offloaded)
        _of_damaged_tables(folder.with_name("b"))
        with pytest.raises(checkpoint.CorruptCheckpointError, match="its tables"):
            offloaded.restore("b")
        assert_same(before, everything(offloaded))
        for name in ("a", "b"):
            offloaded.drop_snapshot(name)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint has, by its place in the tree."""
    leaves, _ = tree_flatten_with_path(checkpoint.load(path))
    return {keystr(place): leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _torch_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": _sgd},
    {"optimizer": _torch_adamw},
    {"optimizer": infinity.AdamW(lr=1e-2, state_dtype=torch.uint8)},
    {"optimizer": infinity.AdamW(state_dtype=torch.bfloat16), "compute_dtype": torch.bfloat16},
]


@pytest.mark.parametrize(
    "options",
    matrix(OPTIMIZERS, usual=OPTIMIZERS[1:3]),
)
def test_state_of_any_optimizer_is_restored(
    options: dict[str, Any], nvme: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    host_memory, dtype = least_budget(Net, folder, **options), options.get("compute_dtype")
    with _block(nvme, host_memory, **options) as offloaded:
        train(offloaded, 0, 3, dtype)
        offloaded.snapshot("a")
        before = everything(offloaded)
        train(offloaded, 3, 5, dtype)
        after = everything(offloaded)
    with _block(nvme, host_memory, seed=4, **options) as offloaded:
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        train(offloaded, 3, 5, dtype)
        assert_same(after, everything(offloaded))
        offloaded.drop_snapshot("a")


def test_snapshot_of_a_model_for_inference_is_restored(nvme: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": None, "compute_dtype": torch.bfloat16}
    with _block(nvme, 12 << 20, **options) as offloaded:
        offloaded.snapshot("a")
        before = everything(offloaded)
    with _block(nvme, 12 << 20, seed=4, **options) as offloaded:
        offloaded.restore("a")
        assert_same(before, everything(offloaded))
        offloaded.drop_snapshot("a")


def _half_frozen(seed: int) -> Net:
    model = seeded(Net, seed)
    model.layers[:7].requires_grad_(False)
    return model


def test_frozen_weights_are_kept_once_through_many_processes(nvme: Path) -> None:
    host_memory = least_budget(lambda: _half_frozen(0), nvme, optimizer=ADAMW)
    options: dict[str, Any] = {"optimizer": ADAMW, "host_memory": host_memory}
    with infinity.offload(_half_frozen(0), nvme, **options) as offloaded:
        train(offloaded, 0, 2)
        offloaded.snapshot("step-2")
        after = everything(offloaded)
    for step in range(2, 5):
        with infinity.offload(_half_frozen(step), nvme, **options) as offloaded:
            offloaded.restore(f"step-{step}")
            assert_same(after, everything(offloaded))
            train(offloaded, step, step + 1)
            offloaded.snapshot(f"step-{step + 1}", keep=1)
            after = everything(offloaded)
            taken = offloaded.snapshots()
            assert [one.name for one in taken] == [f"step-{step + 1}"]
    kept = sum(path.lstat().st_blocks * 512 for path in nvme.rglob("*") if path.is_file())
    assert kept < taken[0].nbytes + 64 * 1024
    with infinity.offload(_half_frozen(9), nvme, **options) as offloaded:
        offloaded.restore("step-5")
        assert_same(after, everything(offloaded))
        offloaded.drop_snapshot("step-5")
        assert_same(after, everything(offloaded))


def test_snapshot_copies_nothing_that_is_on_nvme_and_restoring_reads_nothing_of_it(
    least: int, nvme: Path
) -> None:
    with _block(nvme, least) as offloaded:
        train(offloaded, 0, 2)
        offloaded.flush()
        state = training_of(offloaded).state
        assert state.extents is not None
        vars(state.extents)["_transfer"] = _refuse
        taken = offloaded.snapshot("a")
        offloaded.restore("a")
        held = state.placement.state_host_bytes
        assert taken.written_bytes < held + 16 * 4096
        assert taken.nbytes - taken.written_bytes == state.placement.state_nvme_bytes
        del vars(state.extents)["_transfer"]
        offloaded.drop_snapshot("a")


def _refuse(*_: object) -> Any:
    raise AssertionError("bytes on NVMe were moved")


def test_keep_drops_the_oldest_of_this_model_and_none_of_others(nvme: Path) -> None:
    other = nn.Linear(64, 64)
    with infinity.offload(other, nvme, host_memory=WHOLE) as offloaded:
        offloaded.snapshot("z-other", keep=1)
    with _block(nvme, WHOLE) as offloaded:
        for name in ("c", "b", "a"):
            offloaded.snapshot(name, keep=2)
        assert [one.name for one in offloaded.snapshots()] == ["z-other", "b", "a"]
        offloaded.snapshot("b", keep=2)
        assert [one.name for one in offloaded.snapshots()] == ["z-other", "a", "b"]
        with pytest.raises(FileExistsError, match="another model's"):
            offloaded.snapshot("z-other")
        with pytest.raises(ValueError, match=r"z-other|has no parameter"):
            offloaded.restore("z-other")
        for one in offloaded.snapshots():
            offloaded.drop_snapshot(one.name)


def test_files_that_a_restored_block_reads_are_closed_with_it(least: int, nvme: Path) -> None:
    """Without the collector: until it runs, a file that was removed would keep its space."""
    options: dict[str, Any] = {"optimizer": ADAMW, "host_memory": least}

    def open_files() -> list[str]:
        links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return [name for link in links if ".swap" in (name := str(link.readlink()))]

    with infinity.offload(seeded(Net), nvme, **options) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
    gc.disable()
    try:
        with infinity.offload(seeded(Net, 8), nvme, **options) as offloaded:
            offloaded.restore("a")
            assert any("snapshots-" in name for name in open_files())
            train(offloaded, 1, 2)
            offloaded.drop_snapshot("a")
        assert not open_files()
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["snapshot", "restore", "drop_snapshot", "save"])
def test_call_in_the_midst_of_a_snapshot_of_its_thread_is_refused(
    call: str, least: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handler of a signal would make it, which comes while the snapshot is waited for."""
    sheltered = vars(points)["sheltered"]
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory=least) as offloaded:
        train(offloaded, 0, 1)
        offloaded.snapshot("a")
        calls: dict[str, Callable[[], object]] = {
            "snapshot": lambda: offloaded.snapshot("b"),
            "restore": lambda: offloaded.restore("a"),
            "drop_snapshot": lambda: offloaded.drop_snapshot("a"),
            "save": lambda: offloaded.save(tmp_path / "saved", snapshot="a"),
        }

        def interrupted(*arguments: Any) -> Any:
            with pytest.raises(RuntimeError, match="Set a flag there"):
                calls[call]()
            return sheltered(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(points, "sheltered", interrupted)
            offloaded.snapshot("c")
        assert {point.name for point in offloaded.snapshots()} == {"a", "c"}
        offloaded.drop_snapshot("a")
        offloaded.drop_snapshot("c")


def test_what_snapshots_of_other_directories_keep_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    options: dict[str, Any] = {"optimizer": ADAMW}
    options["host_memory"] = least_budget(Net, tmp_path, **options)
    with infinity.offload(seeded(Net), [first, second], **options) as one:
        train(one, 0, 1, None)
        one.snapshot("a")
    (kept,) = second.glob(".infinity/snapshots-*/*")
    with infinity.offload(seeded(Net), second, **options) as two:
        assert two.snapshots() == []
    assert str(kept) in caplog.text
    caplog.clear()
    with infinity.offload(seeded(Net), [first, second], **options) as one:
        one.drop_snapshot("a")
    assert str(kept) not in caplog.text
    assert list(second.iterdir()) == []
