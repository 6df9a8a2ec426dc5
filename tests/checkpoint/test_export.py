"""Hugging Face shards from tensors and from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
from checkpoint.format.checksum import CRC_BLOCK_BYTES
from tests.checkpoint.trees import bits
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by its index, with stock safetensors."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in sorted(set(weight_map.values()))}
    assert {name for shard in shards.values() for name in shard} == set(weight_map)
    return {name: shards[file][name] for name, file in weight_map.items()}


@pytest.fixture
def state() -> dict[str, Any]:
    weight = torch.randn(1000, 700)
    return {
        "model": {
            "wte": weight,
            "head": weight.detach(),
            "rows": weight[10:20],
            "columns": weight[:, 5:7],
            "turned": torch.randn(30, 40).t(),
            "half": torch.randn(3).to(torch.bfloat16),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5),
        },
        "long": torch.randn(CRC_BLOCK_BYTES // 4 + 77),
        "array": np.arange(5),
        "step": 3,
    }


@pytest.mark.parametrize("max_shard_bytes", [10, 3_000_000, 1 << 40])
def test_a_checkpoint_exports_to_shards_that_stock_safetensors_reads(
    tmp_path: Path, state: dict[str, Any], max_shard_bytes: int
) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save(state, tmp_path / "step", stripes)
    folder = tmp_path / "hf"
    files = checkpoint.export_safetensors(
        tmp_path / "step", folder, max_shard_bytes=max_shard_bytes
    )
    assert sorted(files) == sorted(folder.iterdir())
    assert files[-1].name == "model.safetensors.index.json"
    read = read_back(folder)
    assert list(read) == checkpoint.list_tensors(tmp_path / "step")
    for name, tensor in state["model"].items():
        assert read[f"model.{name}"].dtype == tensor.dtype
        assert bits(read[f"model.{name}"]) == bits(tensor)
    assert bits(read["long"]) == bits(state["long"])
    assert read["array"].tolist() == [0, 1, 2, 3, 4]
    if max_shard_bytes == 3_000_000:
        assert len(files) > 3
        sizes = [sum(t.nbytes for t in load_file(file).values()) for file in files[:-1]]
        assert all(
            size <= max_shard_bytes or len(load_file(file)) == 1
            for size, file in zip(sizes, files[:-1], strict=True)
        )


def test_a_prefix_selects_and_is_taken_off(tmp_path: Path, state: dict[str, Any]) -> None:
    checkpoint.save(state, tmp_path / "step")
    checkpoint.export_safetensors(tmp_path / "step", tmp_path / "hf", prefix="model.")
    assert set(read_back(tmp_path / "hf")) == set(state["model"])
    with pytest.raises(ValueError, match="'nothing' is the beginning of no name"):
        checkpoint.export_safetensors(tmp_path / "step", tmp_path / "x", prefix="nothing")
    assert not (tmp_path / "x").exists()


def test_damage_stops_an_export_and_leaves_nothing(tmp_path: Path, state: dict[str, Any]) -> None:
    checkpoint.save(state, tmp_path / "step")
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 100_000)
        opened.write(b"damage")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="CRC"):
        checkpoint.export_safetensors(tmp_path / "step", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_tensors_arrays_and_sources_are_written_as_shards(tmp_path: Path) -> None:
    class Sevens:
        dtype = torch.uint8
        shape = (3_000_000,)

        def read(self, start: int, out: memoryview) -> None:
            out[:] = b"\7" * len(out)

    tensors = {"s": Sevens(), "t": torch.arange(5)[::2], "n": np.ones(3, np.float32)}
    files = checkpoint.write_safetensors(tensors, tmp_path / "out", staging_bytes=1 << 20)
    assert [file.name for file in files] == ["model.safetensors", "model.safetensors.index.json"]
    read = read_back(tmp_path / "out")
    assert bool((read["s"] == 7).all())
    assert read["t"].tolist() == [0, 2, 4]
    assert read["n"].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="'x'"):
        checkpoint.write_safetensors({"x": torch.empty(1, device="meta")}, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_shards_replace_the_single_file_of_an_earlier_export(tmp_path: Path) -> None:
    """`from_pretrained` would take that one, whatever the index says."""
    folder = tmp_path / "folder"
    for names, value in ((("a",), 1.0), (("a", "b", "c"), 2.0)):
        checkpoint.save({name: torch.full((64,), value) for name in names}, tmp_path / str(value))
        checkpoint.export_safetensors(tmp_path / str(value), folder, max_shard_bytes=300)
    assert not (folder / "model.safetensors").exists()
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*where.values()}) == 3
    for name, file in where.items():
        assert torch.equal(load_file(folder / file)[name], torch.full((64,), 2.0))


def test_shards_of_an_earlier_export_and_of_a_killed_one_go(tmp_path: Path) -> None:
    """Readers that take every `*.safetensors` of a folder would take them."""
    folder = tmp_path / "folder"
    tensors = {name: torch.ones(64) for name in "abc"}
    checkpoint.write_safetensors(tensors, folder, max_shard_bytes=300)
    (folder / "model-00002-of-00009.safetensors.tmp").write_bytes(b"killed")
    (folder / "model-extra.safetensors").write_bytes(b"somebody's")
    files = checkpoint.write_safetensors({"a": torch.zeros(3)}, folder)
    there = {file.name for file in folder.iterdir()}
    assert there == {file.name for file in files} | {"model-extra.safetensors"}


@pytest.mark.parametrize("index", [None, '{"weight_map": {"a": "model.safetensors"}}', "[1]"])
def test_a_whole_file_of_somebody_else_stays_and_shards_beside_it_are_refused(
    tmp_path: Path, index: str | None
) -> None:
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(b"theirs")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    before = sorted(tmp_path.iterdir())
    tensors = {name: torch.ones(64) for name in "abc"}
    with pytest.raises(FileExistsError, match=r"instead of the shards.*model\.safetensors"):
        checkpoint.write_safetensors(tensors, tmp_path, max_shard_bytes=300)
    assert sorted(tmp_path.iterdir()) == before
    assert whole.read_bytes() == b"theirs"


def test_a_second_export_to_a_folder_is_refused_while_one_runs(tmp_path: Path) -> None:
    """Each would rename what the other has written in part."""

    class ExportsToo:
        dtype, shape = torch.float32, (4,)
        refusals = 0

        def read(self, start: int, out: memoryview) -> None:
            with pytest.raises(BlockingIOError, match="another export to this folder"):
                checkpoint.write_safetensors({"x": torch.ones(4)}, tmp_path)
            self.refusals += 1
            out[:] = bytes(len(out))

    source = ExportsToo()
    (file, _) = checkpoint.write_safetensors({"x": source}, tmp_path)
    assert source.refusals
    assert load_file(file)["x"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("staging_bytes", [8192, 1 << 20])
def test_tensors_after_one_of_odd_length_are_read_in_whole_elements(
    tmp_path: Path, staging_bytes: int
) -> None:
    """Buffers end anywhere in a file; not within an element, which no reader could give in part."""

    class Counts:
        dtype, shape = torch.float32, (300, 200)

        def read(self, start: int, out: memoryview) -> None:
            assert start % 4 == len(out) % 4 == 0
            first = start // 4
            out[:] = np.arange(first, first + len(out) // 4, dtype=np.float32).tobytes()

    pairs = torch.randn(300, 200, dtype=torch.complex128)
    tensors: dict[str, Any] = {
        "mask": torch.tensor([True, False, True]),
        "turned": torch.randn(300, 200).t(),
        "half": torch.ones(1, dtype=torch.bfloat16),
        "conjugated": torch.randn(300, 200, dtype=torch.complex64).conj(),
        "pairs": torch.view_as_real(pairs).transpose(0, 1),
        "long": torch.arange(40_000)[::2],
        "array": np.asfortranarray(np.arange(60_000, dtype=np.float64).reshape(300, 200)),
        "source": Counts(),
    }
    checkpoint.write_safetensors(tensors, tmp_path, staging_bytes=staging_bytes)
    read = read_back(tmp_path)
    assert list(read) == list(tensors)
    for name in ("mask", "turned", "half", "conjugated", "long"):
        assert torch.equal(read[name], tensors[name]), name
    assert torch.equal(read["pairs"], torch.view_as_real(pairs.t().contiguous()))
    assert torch.equal(read["array"], torch.from_numpy(np.array(tensors["array"])))
    assert torch.equal(read["source"].flatten(), torch.arange(60_000, dtype=torch.float32))


def test_a_strided_view_in_a_checkpoint_exports_after_a_tensor_of_odd_length(
    tmp_path: Path,
) -> None:
    weight = torch.randn(1000, 1200)
    state = {"mask": torch.ones(3, dtype=torch.bool), "weight": weight, "view": weight.t()[:900]}
    checkpoint.save(state, tmp_path / "step")
    checkpoint.export_safetensors(tmp_path / "step", tmp_path / "hf")
    for name, tensor in read_back(tmp_path / "hf").items():
        assert torch.equal(tensor, state[name]), name
