"""The pure parts of a save and a load, by properties: boxes, names, aliasing, stripes, runs."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT, Entry, plan_data_file
from checkpoint.format.names import unique_names
from checkpoint.format.slices import (
    contiguous_strides,
    flat_first,
    is_contiguous,
    is_dense,
    may_overlap_itself,
    range_boxes,
    span_elements,
)
from checkpoint.plan.aliasing import Region, Stored, View, plan_aliasing
from checkpoint.plan.read_runs import Wanted, plan_reads
from checkpoint.plan.striping import Part, plan_stripes
from checkpoint.plan.write_runs import ZEROS, Extent, plan_runs, plan_slots

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_range_boxes_give_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    whole = np.arange(count).reshape(shape)
    boxes = list(range_boxes(shape, first, last))
    assert [whole[slices].shape for slices, _ in boxes] == [size for _, size in boxes]
    found = [int(item) for slices, _ in boxes for item in whole[slices].reshape(-1)]
    assert found == list(range(first, last))
    assert len(boxes) <= 2 * len(shape) + 1


@given(shapes, st.data())
def test_what_may_not_overlap_itself_does_not(shape: tuple[int, ...], data: st.DataObject) -> None:
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    places = np.lib.stride_tricks.as_strided(
        np.arange(1000), shape, [8 * stride for stride in strides]
    )
    assert may_overlap_itself(shape, strides) or len(set(places.flat)) == math.prod(shape)
    dense = contiguous_strides(shape)
    assert not may_overlap_itself(shape, dense)
    assert not may_overlap_itself(shape[::-1], dense[::-1])


@given(shapes, st.data())
def test_flat_first_finds_gapless_boxes_and_no_others(
    whole: tuple[int, ...], data: st.DataObject
) -> None:
    start = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(
        data.draw(st.integers(1, size - low)) for low, size in zip(start, whole, strict=True)
    )
    slices = tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
    elements = np.arange(math.prod(whole)).reshape(whole)[slices].reshape(-1)
    gapless = bool((np.diff(elements) == 1).all())
    assert flat_first(whole, start, shape) == (int(elements[0]) if gapless else None)


@given(shapes, st.randoms(use_true_random=False))
def test_strides_are_told_apart(shape: tuple[int, ...], random: Any) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.empty(shape)
    turned = tensor.permute(order)
    assert contiguous_strides(shape) == tensor.stride()
    assert is_contiguous(turned.shape, turned.stride()) == turned.is_contiguous()
    assert is_dense(turned.shape, turned.stride())
    assert span_elements(turned.shape, turned.stride()) == tensor.numel()
    if shape and shape[0] > 2:
        assert not is_dense(tensor[::2].shape, tensor[::2].stride()) or math.prod(shape[1:]) == 0


@given(st.lists(st.sampled_from(["a", "a~2", "a~3", "", "state", "__pad__x", "__metadata__"])))
def test_names_are_unique_and_stable(natural: list[str]) -> None:
    names = unique_names(natural)
    assert len(set(names)) == len(natural)
    assert not any(name.startswith("__pad__") or name == "__metadata__" for name in names)
    for name in {"a", "a~2", "state"} & set(natural):
        assert names[natural.index(name)] == name, "the first of a name keeps it"
    assert unique_names(names) == names


def _region(data: st.DataObject) -> Region:
    itemsize = data.draw(st.sampled_from([1, 4, 8]))
    shape = data.draw(st.sampled_from([(), (1,), (6,), (2, 3), (3, 0), (4, 4)]))
    strides = data.draw(
        st.sampled_from(
            [contiguous_strides(shape), tuple(2 * s for s in contiguous_strides(shape))]
        )
    )
    return Region(
        data.draw(st.sampled_from("ab")),
        itemsize * data.draw(st.integers(0, 20)),
        itemsize,
        shape,
        strides,
    )


def _bytes_of(region: Region) -> set[int]:
    """Every byte that an element of the region covers."""
    found = set()
    for index in np.ndindex(*region.shape):
        first = region.offset + region.itemsize * sum(
            i * s for i, s in zip(index, region.strides, strict=True)
        )
        found |= set(range(first, first + region.itemsize))
    return found


@given(st.data())
def test_sharing_keeps_every_byte_reachable_and_every_distance(data: st.DataObject) -> None:
    regions = [_region(data) for _ in range(data.draw(st.integers(0, 6)))]
    aliasing = plan_aliasing(regions)
    placed: dict[tuple[object, int], int] = {}
    for region, place in zip(regions, aliasing.places, strict=True):
        if isinstance(place, View):
            base = regions[place.base]
            assert isinstance(aliasing.places[place.base], Stored)
            assert region.key == base.key
            assert region.offset == base.offset + place.offset
            assert _bytes_of(region) <= _bytes_of(base)
        elif place.storage is not None:
            nbytes = aliasing.storages[place.storage]
            assert place.offset + region.end - region.offset <= nbytes
            assert place.offset % region.itemsize == region.offset % region.itemsize
            for byte in _bytes_of(region):
                at = placed.setdefault((region.key, byte), place.offset + byte - region.offset)
                assert at == place.offset + byte - region.offset, "one byte in two places"
    spots = [(place, at) for (place, _), at in placed.items()]
    assert len(spots) == len(set(spots)), "two bytes in one place"


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12),
    st.lists(st.floats(0.1, 5), min_size=1, max_size=5),
    st.integers(1, 400),
)
def test_stripes_tile_every_tensor_and_share_by_weight(
    sizes: list[tuple[int, ...]], weights: list[float], min_shard: int
) -> None:
    parts = [Part(4, (0,) * len(shape), shape) for shape in sizes]
    stripes = plan_stripes(parts, weights, min_shard)
    assert len(stripes) == len(weights)
    for shards in stripes:
        assert [shard.tensor for shard in shards] == sorted({shard.tensor for shard in shards})
    for index, part in enumerate(parts):
        own = sorted(
            (shard for shards in stripes for shard in shards if shard.tensor == index),
            key=lambda shard: shard.first_byte,
        )
        assert [shard.first_byte for shard in own[1:]] == list(
            np.cumsum([shard.nbytes for shard in own])[:-1]
        )
        assert sum(shard.nbytes for shard in own) == part.nbytes
        for shard in own:
            assert flat_first(part.shape, shard.start, shard.shape) == shard.first_byte // 4
            assert math.prod(shard.shape) * 4 == shard.nbytes
    total = sum(part.nbytes for part in parts)
    coarse = max(
        [2 * min_shard, *(part.nbytes // max(part.shape[0], 1) for part in parts if part.shape)]
    )
    whole = max([0, *(part.nbytes for part in parts if part.nbytes < len(weights) * min_shard)])
    for shards, weight in zip(stripes, weights, strict=True):
        share = total * weight / sum(weights)
        assert sum(shard.nbytes for shard in shards) <= share + 2 * (coarse + whole) + 4 * 40


entries = st.lists(
    st.builds(
        lambda count, start: (count, start),
        st.integers(0, 5000),
        st.sampled_from([0, 0, 3]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(entries)
def test_data_files_are_safetensors_of_whole_blocks(sizes: list[tuple[int, int]]) -> None:
    items = [
        Entry(f"t{k}\"'\n", "I16", (count,), (start,), 2 * count)
        for k, (count, start) in enumerate(sizes)
    ]
    layout = plan_data_file(items, label="r0-0", metadata={"checkpoint": "00c0ffee"})
    assert layout.nbytes % ALIGNMENT == 0
    assert len(layout.header) % ALIGNMENT == 0
    content = bytearray(layout.header).ljust(layout.nbytes, b"\0")
    for k, (item, offset) in enumerate(zip(items, layout.offsets, strict=True)):
        assert offset % ALIGNMENT == 0
        content[offset : offset + item.nbytes] = struct.pack("<h", k) * item.shape[0]
    loaded = load_safetensors(bytes(content))
    for k, item in enumerate(items):
        assert torch.equal(loaded[item.name], torch.full(item.shape, k, dtype=torch.int16))
    assert all(not tensor.any() for name, tensor in loaded.items() if name.startswith("__pad__"))
    (length,) = struct.unpack("<Q", layout.header[:8])
    metadata = json.loads(layout.header[8 : 8 + length])["__metadata__"]
    assert ("DCP_SHARDING_INFO" in metadata) == any(start for _, start in sizes)


def test_a_data_file_with_too_long_a_header_is_refused() -> None:
    entry = Entry("x" * 100_000_000, "U8", (1,), (0,), 1)
    with pytest.raises(ValueError, match="more stripe_dirs"):
        plan_data_file([entry], label="r0-0", metadata={})


def _laid_out(sizes: list[int], header: int = 1) -> tuple[list[int], int]:
    offsets, cursor = [], header * ALIGNMENT
    for nbytes in sizes:
        offsets.append(cursor)
        cursor += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, cursor


big_sizes = st.lists(
    st.one_of(
        st.integers(0, 20_000),
        st.integers(CRC_BLOCK_BYTES - 5000, CRC_BLOCK_BYTES + 5000),
        st.just(2 * CRC_BLOCK_BYTES + 7),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(big_sizes, st.integers(1, 5000), st.data())
def test_runs_write_every_byte_once_in_order(
    sizes: list[int], run_pages: int, data: st.DataObject
) -> None:
    offsets, total = _laid_out(sizes)
    extents = [Extent(0, ALIGNMENT)] + [
        Extent(offset, nbytes, nbytes >= ALIGNMENT and data.draw(st.booleans()))
        for offset, nbytes in zip(offsets, sizes, strict=True)
    ]
    reached, done = 0, [0] * len(extents)
    for run in plan_runs(extents, total, run_pages * ALIGNMENT):
        assert run.offset == reached
        assert run.offset % ALIGNMENT == run.nbytes % ALIGNMENT == 0
        assert run.direct or run.nbytes <= run_pages * ALIGNMENT
        inside = 0
        for number, first, place, nbytes in run.pieces:
            assert place == inside
            assert nbytes > 0
            inside += nbytes
            if number == ZEROS:
                continue
            assert first == done[number]
            assert run.offset + place == extents[number].offset + first
            assert first // CRC_BLOCK_BYTES == (first + nbytes - 1) // CRC_BLOCK_BYTES
            done[number] += nbytes
        assert inside == run.nbytes
        assert not run.direct or len(run.pieces) == 1
        reached += run.nbytes
    assert reached == total
    assert done == [extent.nbytes for extent in extents]


@settings(deadline=None)
@given(big_sizes, st.integers(1, 5000), st.booleans(), st.data())
def test_reads_bring_every_wanted_byte_once_and_whole_units(
    sizes: list[int], run_pages: int, verify: bool, data: st.DataObject
) -> None:
    offsets, total = _laid_out(sizes)
    wanted = []
    for offset, nbytes in zip(offsets, sizes, strict=True):
        first = data.draw(st.integers(0, nbytes))
        last = data.draw(st.integers(first, nbytes))
        if data.draw(st.booleans()):
            first, last = 0, nbytes
        unit = data.draw(st.sampled_from([ALIGNMENT, 64 << 10, CRC_BLOCK_BYTES]))
        wanted.append(Wanted(offset, nbytes, first, last, data.draw(st.booleans()), unit))
    kept: list[list[tuple[int, int]]] = [[] for _ in wanted]
    summed: dict[tuple[int, int], int] = {}
    reached = 0
    for run in plan_reads(wanted, run_pages * ALIGNMENT, verify=verify):
        filled = 0
        for span in run.spans:
            assert span.offset % ALIGNMENT == span.nbytes % ALIGNMENT == 0 < span.nbytes
            assert span.place == filled
            assert span.offset >= reached
            filled, reached = span.place + span.nbytes, span.offset + span.nbytes
        assert filled == run.nbytes
        assert reached <= total
        assert run.direct or run.nbytes <= run_pages * ALIGNMENT
        for piece in run.pieces:
            item = wanted[piece.chunk]
            assert piece.nbytes > 0
            (span,) = (one for one in run.spans if 0 <= piece.place - one.place < one.nbytes)
            assert span.offset + piece.place - span.place == item.offset + piece.first
            assert piece.place + piece.nbytes <= span.place + span.nbytes
            if item.unit == CRC_BLOCK_BYTES:
                assert piece.first // item.unit == (piece.first + piece.nbytes - 1) // item.unit
            position = piece.first
            while position < piece.first + piece.nbytes:
                unit, inside = divmod(position, item.unit)
                assert summed.get((piece.chunk, unit), 0) == inside or not verify
                position = min((unit + 1) * item.unit, piece.first + piece.nbytes)
                summed[piece.chunk, unit] = position - unit * item.unit
            if piece.kept:
                kept[piece.chunk].append((piece.first, piece.first + piece.nbytes))
    for item, ranges in zip(wanted, kept, strict=True):
        position = item.first
        for first, last in ranges:
            assert first == position
            position = last
        assert position == max(item.first, item.last)
    if verify:
        for (chunk, number), end in summed.items():
            item = wanted[chunk]
            assert number in range(item.first // item.unit, -(-item.last // item.unit))
            assert end == min(item.unit, item.nbytes - number * item.unit)


@given(st.integers(1, 1 << 40), st.integers(2 * ALIGNMENT, 1 << 30))
def test_slots_fit_their_budget(nbytes: int, budget: int) -> None:
    slots = plan_slots(nbytes, budget)
    assert slots.nbytes % ALIGNMENT == 0
    assert slots.count * slots.nbytes <= budget
    assert slots.count >= 2 or slots.nbytes >= nbytes
