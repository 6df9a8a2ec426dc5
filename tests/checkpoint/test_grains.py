"""Grains: checksums of the parts of a block, by which parts of tensors are read and verified."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_resharding import counted, cut
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_ways import indices, planned, save_in_boxes, sinks

import checkpoint
from checkpoint.directory.locate import read_manifest
from checkpoint.format import checksum
from checkpoint.format.checksum import CRC_BLOCK_BYTES, GRAIN_SIZES, crc32c, grain_bytes
from checkpoint.format.slices import box_ranges, elements_before, merged
from checkpoint.saving.api import SaveRequest, save_on
from tests.checkpoint.test_hostile import write
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()
WAYS = {"load": sinks, "open": indices, "dcp": planned}


@pytest.fixture
def _small_states_have_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_UNGRAINED_STATE_BYTES", 0)


def without_grains(path: Path) -> None:
    """Makes a checkpoint one of the time before there were grains."""
    document: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    for tensor in document["tensors"]:
        for chunk in tensor["chunks"]:
            del chunk["grains"]
    write(path / "manifest.json", document)


@pytest.mark.usefixtures("_small_states_have_grains")
@pytest.mark.parametrize("saved", [1, 3])
@pytest.mark.parametrize("staging_bytes", [1 << 16, 32 << 20])
def test_grains_are_the_sums_of_the_bytes_that_blocks_sum(
    tmp_path: Path, saved: int, staging_bytes: int
) -> None:
    weight = torch.rand(CRC_BLOCK_BYTES // 4 + 12_345)
    state = {"w": weight, "turned": torch.rand(99, 201).t(), "page": torch.rand(1024)}
    stripes = [tmp_path / f"{number}" for number in range(saved)]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save(state, tmp_path / "step", stripes, staging_bytes=staging_bytes)
    manifest = read_manifest(tmp_path / "step")
    assert len(manifest.tensors) == 3
    for record in manifest.tensors:
        for chunk in record.chunks:
            path = manifest.file_path(tmp_path / "step", manifest.files[chunk.file])
            raw = np.fromfile(path, np.uint8)[chunk.offset :][: chunk.nbytes]
            assert chunk.grain_nbytes == (4096 if len(raw) > 4096 else 0)
            for unit in {chunk.grain_nbytes, CRC_BLOCK_BYTES} - {0}:
                sums = [crc32c(raw[low : low + unit]) for low in range(0, len(raw), unit)]
                assert chunk.unit_sums(unit, 0, len(sums) + 1).tolist() == sums


def test_a_checkpoint_without_grains_is_read_in_blocks(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(10 << 8, 4096)}
    save_in_boxes(tmp_path / "step", tensors, cut(0, 1))
    without_grains(tmp_path / "step")
    box = ((900, 0), (64, 4096))
    for way in WAYS.values():
        with counted() as reads:
            way(tmp_path / "step", tensors, [box])
        assert sum(reads) == CRC_BLOCK_BYTES
    with counted() as reads, checkpoint.open(tmp_path / "step", verify=False) as lazy:
        assert torch.equal(lazy["w"][900:964], tensors["w"][900:964])
    assert sum(reads) == 1 << 20


@pytest.mark.usefixtures("_small_states_have_grains")
@pytest.mark.parametrize("way", WAYS)
def test_damage_is_named_by_its_grain_and_hides_no_other(tmp_path: Path, way: str) -> None:
    tensors = {"w": torch.rand(64, 4096)}
    save_in_boxes(tmp_path / "step", tensors, cut(0, 1))
    (file,) = (tmp_path / "step").glob("*/*.safetensors")
    raw = bytearray(file.read_bytes())
    (chunk,) = read_manifest(tmp_path / "step").tensors[0].chunks
    raw[chunk.offset + 20 * 16384 + 5000] ^= 1  # in the second page of row 20
    file.write_bytes(raw)
    WAYS[way](tmp_path / "step", tensors, [((0, 0), (20, 4096))])
    WAYS[way](tmp_path / "step", tensors, [((21, 0), (43, 4096))])
    WAYS[way](tmp_path / "step", tensors, [((20, 0), (1, 1024))])
    with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
        WAYS[way](tmp_path / "step", tensors, [((18, 0), (9, 4096))])
    assert caught.value.tensor == "w"
    assert caught.value.offset == chunk.offset + 20 * 16384 + 4096
    assert caught.value.nbytes == 4096
    assert not checkpoint.verify(tmp_path / "step")


@pytest.mark.parametrize(
    ("grains", "words"),
    [
        ([4096, "00" * 11], "eight hexadecimal"),
        ([4096, "zz" * 4], "hexadecimal"),
        ([4096, "AB" * 4], "hexadecimal"),
        ([4096, ""], "hexadecimal"),
        (["4096", "00000000"], "should be an integer"),
        ([4096], "a size and a text"),
        ("00000000", "a size and a text"),
        ([4096, "00000000"], "1 grains of 4096 in a chunk"),
        ([5000, "0" * 8 * 3], "3 grains of 5000 in a chunk"),
        ([0, "00000000"], "in a chunk"),
        ([CRC_BLOCK_BYTES, "00000000"], "1 grains of 16777216 in a chunk"),
        ([16384, "00000000"], "1 grains of 16384 in a chunk"),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_grains_that_are_none_are_refused(
    tmp_path: Path, grains: Any, words: str, is_whole: bool
) -> None:
    checkpoint.save({"w": torch.rand(3, 1024)}, tmp_path / "step")
    document = json.loads((tmp_path / "step" / "manifest.json").read_text())
    chunk = document["tensors"][0]["chunks"][0]
    chunk["grains"] = grains
    if not is_whole:
        chunk |= {"start": [0, 0], "shape": [3, 1024]}
    write(tmp_path / "step" / "manifest.json", document)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=words):
        checkpoint.load(tmp_path / "step")


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_grains_are_fine_enough_for_512_ranks_and_few_enough_for_a_manifest(
    nbytes: int, others: int
) -> None:
    size = grain_bytes(nbytes, nbytes + others)
    if not size:
        assert nbytes + others <= 32 << 20 or nbytes + others > GRAIN_SIZES[-1] << 22
        return
    assert size in GRAIN_SIZES
    assert (nbytes + others) / size <= 1 << 22
    smallest = size == GRAIN_SIZES[0]
    assert smallest or size < 2 * max(nbytes / (1 << 14), (nbytes + others) / (1 << 22))


boxes = st.integers(1, 4).flatmap(
    lambda count: st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)),
        min_size=count,
        max_size=count,
    )
)


@given(boxes, st.integers(0, 40), st.data())
def test_ranges_of_a_box_have_its_elements_and_no_wide_gap(
    sizes: list[tuple[int, int, int]], gap: int, data: st.DataObject
) -> None:
    start = tuple(low for low, _, _ in sizes)
    shape = tuple(size for _, size, _ in sizes)
    whole = tuple(map(sum, sizes))
    marks = np.zeros(whole, bool)
    marks[tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))] = True
    places = np.flatnonzero(marks).tolist()
    ranges = box_ranges(whole, start, shape, gap)
    found = [place for first, last in ranges for place in range(first, last)]
    assert set(places) <= set(found)
    assert len(found) == len(set(found))
    assert ranges == sorted(ranges)
    if places:
        assert (ranges[0][0], ranges[-1][1]) == (places[0], places[-1] + 1)
        for first, last in ranges:
            own = [place for place in places if first <= place < last]
            assert max(np.diff(own), default=0) <= gap + 1
    edge = data.draw(st.integers(0, math.prod(whole)))
    if math.prod(whole):
        assert elements_before(whole, start, shape, edge) == sum(place < edge for place in places)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60))), st.sampled_from([1, 8, 64]))
def test_merged_ranges_have_the_same_bytes_and_share_no_unit(
    given_ranges: list[tuple[int, int]], unit: int
) -> None:
    ranges = sorted((first, first + length) for first, length in given_ranges)
    found = merged(ranges, unit)
    for first, last in ranges:
        assert first == last or any(low <= first and last <= high for low, high in found)
    edges = {edge for pair in ranges for edge in pair}
    assert {edge for pair in found for edge in pair} <= edges
    widened = [(low // unit, -(-high // unit)) for low, high in found]
    assert all(one[1] < two[0] for one, two in pairwise(widened))


@pytest.mark.usefixtures("_small_states_have_grains")
@given(low=st.integers(0, 6 << 20), count=st.integers(0, 6 << 20))
@settings(max_examples=30, deadline=None)
def test_a_range_of_any_length_has_its_bytes_by_any_way(
    tmp_path_factory: pytest.TempPathFactory, low: int, count: int
) -> None:
    row = torch.arange(6 << 20, dtype=torch.int32)  # 24 MiB, which is a block and a half
    path = _saved_once(tmp_path_factory, row)
    with checkpoint.open(path) as lazy, counted() as reads:
        found = lazy["w"][low : low + count]
        assert torch.equal(found, row[low : low + count])
    assert sum(reads) <= found.nbytes + 2 * 4096
    with checkpoint.open(path) as lazy:  # what was kept meanwhile is the same
        assert torch.equal(lazy["w"][low : low + 10], row[low : low + 10])
        assert torch.equal(lazy["w"][low : low + count], row[low : low + count])


_saved: list[Path] = []


def _saved_once(tmp_path_factory: pytest.TempPathFactory, row: torch.Tensor) -> Path:
    if not _saved:
        path = tmp_path_factory.mktemp("saved") / "step"
        checkpoint.save({"w": row}, path)
        _saved.append(path)
    return _saved[0]


@pytest.mark.usefixtures("_small_states_have_grains")
def test_damage_within_many_grains_is_named_by_one(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.arange(1 << 20)}, tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*/*.safetensors")
    raw = bytearray(file.read_bytes())
    (chunk,) = read_manifest(tmp_path / "step").tensors[0].chunks
    raw[chunk.offset + 777 * 4096 + 5] ^= 1
    file.write_bytes(raw)
    with checkpoint.open(tmp_path / "step") as lazy:
        assert lazy["w"][: 777 * 512].sum() == sum(range(777 * 512))
        with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
            lazy["w"][3 : 800 * 512]
    assert caught.value.offset == chunk.offset + 777 * 4096
    assert caught.value.nbytes == 4096


def test_grains_that_are_not_of_the_bytes_are_found_by_verify(tmp_path: Path) -> None:
    numel = CRC_BLOCK_BYTES // 4 + 5_000
    checkpoint.save({"w": torch.rand(numel), "b": torch.rand(1 << 23)}, tmp_path / "step")
    assert checkpoint.verify(tmp_path / "step").ok
    document: dict[str, Any] = json.loads((tmp_path / "step" / "manifest.json").read_text())
    (chunk,) = document["tensors"][0]["chunks"]
    size, sums = chunk["grains"]
    chunk["grains"] = [size, sums[:-8] + f"{int(sums[-8:], 16) ^ 1:08x}"]
    write(tmp_path / "step" / "manifest.json", document)
    (problem,) = checkpoint.verify(tmp_path / "step").problems
    assert (problem.tensor, problem.path) == ("w", str(tmp_path / "step" / "manifest.json"))
    assert f"the {numel * 4 - CRC_BLOCK_BYTES} bytes from {CRC_BLOCK_BYTES} on" in problem.what


def test_grains_are_as_large_as_was_asked_for_at_least(tmp_path: Path) -> None:
    state = {"large": torch.zeros(9 << 20), "small": torch.zeros(1 << 17)}
    sizes = {}
    for least in (4096, 1 << 20):
        path = tmp_path / str(least)
        save_on(SaveRequest(state=state, path=path, least_grain_nbytes=least))
        records = {record.name: record.chunks[0] for record in read_manifest(path).tensors}
        sizes[least] = {name: chunk.grain_nbytes for name, chunk in records.items()}
        assert len(records["large"].crc32c) == 3
        assert torch.equal(checkpoint.load(path)["large"], state["large"])
    assert sizes == {4096: {"large": 4096, "small": 4096}, 1 << 20: {"large": 1 << 20, "small": 0}}
