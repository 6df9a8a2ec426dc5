"""Checkpoints that are not what was saved: refused by name, never a wrong tensor, never a hang."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from tests.checkpoint.trees import assert_same


def state(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(CRC_BLOCK_BYTES // 4 + 5000, generator=generator),
        "small": [torch.randn(100 + k, generator=generator) for k in range(5)],
        "step": seed,
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "step"
    checkpoint.save(state(1), path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "step")
    return tmp_path / "step"


def data_file(path: Path) -> Path:
    (found,) = path.rglob("*.safetensors")
    return found


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def extents(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and length of every tensor in its file."""
    from checkpoint.directory.locate import read_manifest

    tensors = read_manifest(path).tensors
    return {tensor.name: (tensor.chunks[0].offset, tensor.nbytes) for tensor in tensors}


@pytest.mark.parametrize("name", ["big", "small.0", "small.4"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_in_a_tensor_is_refused_with_its_extent(
    path: Path, name: str, where: str
) -> None:
    offset, nbytes = extents(path)[name]
    at = {"first": 0, "middle": nbytes // 2, "last": nbytes - 1}[where]
    flip(data_file(path), offset + at)
    with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
        checkpoint.load(path)
    error = caught.value
    assert error.path == str(data_file(path))
    assert error.tensor == name
    assert error.offset is not None
    assert error.nbytes is not None
    assert error.offset <= offset + at < error.offset + error.nbytes
    assert name in str(error)
    assert str(data_file(path)) in str(error)
    (problem,) = checkpoint.verify(path).problems
    assert (problem.tensor, problem.offset) == (error.tensor, error.offset)


def test_what_is_whole_loads_beside_what_is_damaged(path: Path) -> None:
    flip(data_file(path), extents(path)["big"][0])
    loaded = checkpoint.load(path, only=["small.*", "step"])
    assert_same({"small": state(1)["small"], "step": 1}, loaded)


def test_damage_can_be_looked_at_without_verifying(path: Path) -> None:
    flip(data_file(path), extents(path)["big"][0])
    loaded = checkpoint.load(path, verify=False)
    assert int((loaded["big"] != state(1)["big"]).sum()) == 1


def test_verify_reports_all_damage_of_headers_tensors_and_gaps(path: Path) -> None:
    places = extents(path)
    file = data_file(path)
    flip(file, 100)
    flip(file, places["small.1"][0])
    flip(file, sum(places["small.2"]) + 3)
    report = checkpoint.verify(path)
    assert not report.ok
    assert [problem.tensor for problem in report.problems] == [None, "small.1", "__pad__"]
    assert all(str(file) in str(problem) for problem in report.problems)


def _truncate(path: Path) -> None:
    os.truncate(data_file(path), data_file(path).stat().st_size - 4096)


def _extend(path: Path) -> None:
    with data_file(path).open("ab") as file:
        file.write(bytes(4096))


def _empty(path: Path) -> None:
    os.truncate(data_file(path), 0)


def _remove(path: Path) -> None:
    data_file(path).unlink()


def _pipe(path: Path) -> None:
    name = data_file(path)
    name.unlink()
    os.mkfifo(name)


def _directory(path: Path) -> None:
    name = data_file(path)
    name.unlink()
    name.mkdir()


def _header(path: Path) -> None:
    flip(data_file(path), 30)


@pytest.mark.parametrize(
    "damage", [_truncate, _extend, _empty, _remove, _pipe, _directory, _header]
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_data_file_that_is_not_the_one_saved_is_refused(
    path: Path, damage: Callable[[Path], None], verify: bool
) -> None:
    name = str(data_file(path))
    damage(path)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"r0-0\.safetensors") as caught:
        checkpoint.load(path, verify=verify)
    assert caught.value.path == name
    assert not checkpoint.verify(path)


@dataclass
class CuttingSink:
    """Cuts the file short that it is loaded from."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def write(self, start: int, data: memoryview) -> None:
        os.truncate(self.file, 4096)


def test_a_data_file_cut_short_while_it_is_loaded_is_refused(path: Path) -> None:
    name = data_file(path)
    sink = CuttingSink(name, (CRC_BLOCK_BYTES // 4 + 5000,))
    with pytest.raises(checkpoint.CorruptCheckpointError, match="the file ends before") as caught:
        checkpoint.load(path, into={"big": sink}, staging_bytes=1 << 20, verify=False)
    assert (caught.value.path, caught.value.tensor) == (str(name), "big")


@pytest.mark.parametrize("verify", [True, False])
def test_a_data_file_cut_short_while_it_is_open_is_refused(path: Path, verify: bool) -> None:
    name = data_file(path)
    offset, nbytes = extents(path)["small.3"]
    with checkpoint.open(path, verify=verify) as tensors:
        os.truncate(name, offset + nbytes // 2)
        assert len(tensors["small.2"][:]) == 102
        with pytest.raises(checkpoint.CorruptCheckpointError, match="the file ends") as caught:
            tensors["small.3"][:]
    assert (caught.value.path, caught.value.tensor) == (str(name), "small.3")


def test_data_files_of_two_checkpoints_swapped_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for seed, place in enumerate((one, two)):
        checkpoint.save(state(seed), place)
    first, second = data_file(one), data_file(two)
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    for place in (one, two):
        for verify in (True, False):
            with pytest.raises(checkpoint.CorruptCheckpointError, match="not the file"):
                checkpoint.load(place, verify=verify)


def test_stripes_of_one_checkpoint_swapped_are_refused(tmp_path: Path) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save({"x": torch.arange(4 << 20)}, tmp_path / "step", stripes)
    first, second = (next(stripe.rglob("*.safetensors")) for stripe in stripes)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="not the file"):
        checkpoint.load(tmp_path / "step", verify=False)


@pytest.mark.parametrize("step", range(0, 4000, 97))
def test_a_flipped_bit_anywhere_in_the_manifest_is_refused(path: Path, step: int) -> None:
    manifest = path / "manifest.json"
    flip(manifest, step % manifest.stat().st_size)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"manifest\.json"):
        checkpoint.load(path)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"manifest\.json"):
        checkpoint.list_tensors(path)
    assert not checkpoint.verify(path)


def test_a_cut_manifest_is_refused(path: Path) -> None:
    manifest = path / "manifest.json"
    raw = manifest.read_bytes()
    for nbytes in (0, 1, 77, 78, 200, len(raw) - 1):
        manifest.write_bytes(raw[:nbytes])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=r"manifest\.json"):
            checkpoint.load(path)


def test_a_manifest_that_is_a_pipe_is_refused_at_once(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="not a regular file"):
        checkpoint.load(path)


def test_a_manifest_of_many_gigabytes_is_refused_unread(path: Path) -> None:
    os.truncate(path / "manifest.json", 1 << 40)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="1099511627776 bytes"):
        checkpoint.load(path)


def test_missing_and_incomplete_checkpoints_are_told_apart(tmp_path: Path) -> None:
    for function in (checkpoint.load, checkpoint.verify, checkpoint.list_tensors):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            function(tmp_path / "nowhere")
        with pytest.raises(checkpoint.IncompleteCheckpointError, match="no save"):
            function(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            function(tmp_path / "file")


def test_a_damaged_checkpoint_can_be_overwritten(path: Path) -> None:
    flip(path / "manifest.json", 200)
    _truncate(path)
    checkpoint.save(state(2), path)
    assert_same(state(2), checkpoint.load(path))
    assert len(list(path.rglob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("zeros", "is_rest_lost"),
    [(0, True), (5000, True), (512, False)],
    ids=["empty", "zeros", "sector"],
)
def test_a_step_of_a_lost_manifest_can_be_saved_again(
    tmp_path: Path, zeros: int, is_rest_lost: bool
) -> None:
    manager = checkpoint.Manager(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    manifest = manager.path(2) / "manifest.json"
    manifest.write_bytes(bytes(zeros) + (b"" if is_rest_lost else manifest.read_bytes()[zeros:]))
    again = checkpoint.Manager(tmp_path)
    assert_same(state(1), again.load())
    again.save(2, state(3))
    assert_same(state(3), again.load())
    assert len(list(manager.path(2).rglob("*.safetensors"))) == 1


def test_another_programs_manifest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(FileExistsError, match="not the manifest of a checkpoint"):
        checkpoint.save({"x": 1}, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_live_tensors_of_a_damaged_load_are_told_of(path: Path) -> None:
    flip(data_file(path), extents(path)["big"][0])
    big = torch.zeros(CRC_BLOCK_BYTES // 4 + 5000)
    live = {"big": big, "array": np.zeros(3)}
    with pytest.raises(ValueError, match="into\\['array'\\] is not in the checkpoint"):
        checkpoint.load(path, into=live)
    assert not big.any()
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(path, into={"big": big})
