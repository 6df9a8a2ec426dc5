"""What anything of this process finds damaged does not count as kept, for any manager."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from checkpoint.dcp import StorageReader
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of two steps, of which the second is damaged where only reading it all tells."""
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (file,) = manager.path(2).rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    return tmp_path / "run"


def _from_dcp(path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(4)}
    dcp_load(state, storage_reader=StorageReader(path))


def _from_open(path: Path) -> None:
    with checkpoint.open(path) as opened:
        opened["w"][1:]


def _from_zarr(path: Path) -> None:
    array: Any = checkpoint.open_zarr(path)["w"]
    array[...]


WAYS: dict[str, Callable[[Path], object]] = {
    "another manager": lambda path: checkpoint.Manager(path.parent).load(),
    "another manager, by number": lambda path: checkpoint.Manager(path.parent).load(2),
    "load": checkpoint.load,
    "verify": checkpoint.verify,
    "open": _from_open,
    "zarr": _from_zarr,
    "export": lambda path: checkpoint.export_safetensors(path, path.parent.parent / "out"),
    "torch.distributed": _from_dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_damage_that_is_found_by_any_way_keeps_the_sound_step(root: Path, way: str) -> None:
    with suppress(BaseException):  # DCP has a kind of its own
        WAYS[way](root / "step-2")
    manager = checkpoint.Manager(root, keep=2)
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]


def test_damage_that_is_found_while_a_header_is_read_keeps_the_sound_step(root: Path) -> None:
    (file,) = (root / "step-2").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(40)
        opened.write(b"x")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="header"):
        checkpoint.open(root / "step-2")
    checkpoint.Manager(root, keep=2).save(3, {"w": torch.zeros(4)})
    assert checkpoint.Manager(root).steps() == [1, 2, 3]


def test_damage_of_a_save_that_was_replaced_is_none_of_what_replaced_it(root: Path) -> None:
    manager = checkpoint.Manager(root, keep=2)
    with checkpoint.open(root / "step-2") as opened:
        manager.save(2, {"w": torch.full((4,), 2.0)})
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC-32C"):
            opened["w"][...]
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [2, 3]


def test_step_that_is_saved_again_counts_as_any_other(root: Path) -> None:
    assert not checkpoint.verify(root / "step-2")
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, {"w": torch.zeros(4)})
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [2, 3]


def test_step_that_was_repaired_counts_when_all_of_it_was_read(root: Path) -> None:
    (file,) = (root / "step-2").rglob("*.safetensors")
    assert not checkpoint.verify(root / "step-2")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(torch.full((4,), 2.0).numpy().tobytes())
    checkpoint.load(root / "step-2")
    checkpoint.Manager(root, keep=2).save(3, {"w": torch.zeros(4)})
    assert checkpoint.Manager(root).steps() == [2, 3]
