"""Tensors saved in boxes of several dimensions: what is asked for is read, and no more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from zarr.storage import FsspecStore

import checkpoint
from checkpoint.loading.opened import OpenCheckpoint, open_current
from checkpoint.plan.windows import goes_forward, windows
from checkpoint.tensors.assembly import TensorView
from tests.checkpoint.boxes import BLOCK, UNIT, Box, Reads, columns, save_in_boxes, small_blocks
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def reads() -> Iterator[Reads]:
    with small_blocks() as counted:
        yield counted


def experts(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


def test_an_export_of_stacked_experts_in_boxes_reads_their_bytes_once(
    tmp_path: Path, reads: Reads
) -> None:
    weight = experts(3, 120, 300)
    for axis, ends in ((1, [50, 120]), (2, [100, 200, 300])):
        step = tmp_path / f"{axis}"
        save_in_boxes(step, "w", weight, columns(weight, axis, ends))
        reads.places.clear()
        (file, _) = checkpoint.export_safetensors(step, tmp_path / "out")
        assert torch.equal(load_file(file)["w"], weight)
        assert reads.nbytes <= 1.1 * weight.nbytes


def test_a_pass_over_boxes_with_more_blocks_side_by_side_than_are_kept_reads_each_twice_at_most(
    tmp_path: Path,
) -> None:
    weight = experts(2400, 160)
    with small_blocks(2 * BLOCK) as reads:
        save_in_boxes(tmp_path / "step", "w", weight, columns(weight, 1, range(20, 161, 20)))
        with open_current(tmp_path / "step") as held:
            (record,) = held.manifest.tensors
            found = bytearray(weight.nbytes)
            for low in range(0, len(found), 32 * UNIT):
                held.read(record, low, memoryview(found)[low : low + 32 * UNIT])
                assert held._blocks.held_bytes <= 2 * BLOCK
        assert bytes(found) == weight.numpy().tobytes()
        assert reads.nbytes <= 2.5 * weight.nbytes


def test_an_index_of_a_tensor_in_boxes_reads_the_blocks_that_it_touches_alone(
    tmp_path: Path, reads: Reads
) -> None:
    weight = experts(4, 200, 300)
    save_in_boxes(tmp_path / "step", "w", weight, columns(weight, 1, [100, 200]))
    for index, files, blocks in (
        ((0, 0, 0), {0}, 1),
        ((1, 199, slice(5, 7)), {1}, 1),
        ((slice(None), slice(0, 1)), {0}, 4),
        ((slice(None), 100), {1}, 4),
        ((2, slice(99, 101)), {0, 1}, 2),
    ):
        with checkpoint.open(tmp_path / "step") as lazy:
            reads.places.clear()
            assert torch.equal(lazy["w"][index], weight[index])
            assert reads.files == files
            assert len(reads.places) <= blocks


def test_damage_to_one_box_fails_what_touches_its_block_alone(tmp_path: Path, reads: Reads) -> None:
    weight = experts(2, 200, 300)
    save_in_boxes(tmp_path / "step", "w", weight, columns(weight, 1, [100, 200]))
    file = next(tmp_path.glob("step-1/*/*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[4096 + BLOCK + 5] ^= 1  # rows 54 to 109 of expert 0's and 1's 100 in this box
    file.write_bytes(raw)
    with checkpoint.open(tmp_path / "step") as lazy:
        for index in ((0, slice(0, 150)), (1, slice(0, 100)), (1, slice(110, 200))):
            assert torch.equal(lazy["w"][index], weight[index])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=file.name):
            lazy["w"][0, 160]


def test_bytes_of_a_block_that_changed_after_it_was_verified_are_refused(tmp_path: Path) -> None:
    weight = experts(4, 60, 100)
    with small_blocks(0) as reads:
        save_in_boxes(tmp_path / "step", "w", weight, columns(weight, 1, [30, 60]))
        file = next(tmp_path.glob("step-0/*/*.safetensors"))
        with checkpoint.open(tmp_path / "step") as lazy:
            assert torch.equal(lazy["w"][0, 3], weight[0, 3])
            raw = bytearray(file.read_bytes())
            raw[4096 + 3 * 400] ^= 1
            file.write_bytes(raw)
            reads.places.clear()
            assert torch.equal(lazy["w"][0, 9], weight[0, 9])
            assert reads.nbytes <= 2 * UNIT
            with pytest.raises(checkpoint.CorruptCheckpointError, match="when they were read"):
                lazy["w"][0, 3]


def test_rows_of_a_view_of_columns_are_read_alone(tmp_path: Path, reads: Reads) -> None:
    weight = experts(2000, 60).to(torch.float32)
    state = {"w": weight, "q": weight[:, 5:20], "t": weight.t()}
    checkpoint.save(state, tmp_path / "step")
    with checkpoint.open(tmp_path / "step") as lazy:
        for row in range(10):
            assert torch.equal(lazy["q"][row], weight[row, 5:20])
        assert len(reads.places) == 1
        assert torch.equal(lazy["t"][3:5, 1500:1510], weight.t()[3:5, 1500:1510])
        assert len(reads.places) <= 3
        assert lazy.opened._span is None
    reads.places.clear()
    (file, _) = checkpoint.export_safetensors(tmp_path / "step", tmp_path / "out", only="q")
    assert torch.equal(load_file(file)["q"], state["q"])
    assert reads.nbytes <= 1.1 * weight.nbytes


@pytest.mark.parametrize(
    ("shape", "axis", "ends"), [((6, 20, 300), 1, [10, 20]), ((9, 6000), 1, [2000, 6000])]
)
def test_references_to_a_tensor_in_boxes_say_where_it_lies(
    tmp_path: Path, reads: Reads, shape: tuple[int, ...], axis: int, ends: list[int]
) -> None:
    weight = experts(*shape)
    save_in_boxes(tmp_path / "step", "w", weight, columns(weight, axis, ends))
    file = checkpoint.write_references(tmp_path / "step", tmp_path / "references.json")
    assert reads.places == []
    assert "base64:" not in file.read_text()
    files = fsspec.filesystem("reference", fo=str(file), asynchronous=True)
    group = zarr.open_group(FsspecStore(files, read_only=True, path=""), mode="r")
    assert torch.equal(torch.from_numpy(np.asarray(group["w"])), weight)


def test_a_tensor_in_columns_of_uneven_widths_is_left_out_of_references_with_a_warning(
    tmp_path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    weight = experts(3000, 11)
    save_in_boxes(tmp_path / "step", "w", weight, columns(weight, 1, [5, 11]))
    file = checkpoint.write_references(tmp_path / "step", tmp_path / "references.json")
    assert list(json.loads(file.read_text())["refs"]) == ["zarr.json"]
    assert "w lies in uneven boxes" in caplog.text


GRID: list[Box] = [
    (slice(a, b), slice(c, d), slice(e, f))
    for a, b in ((0, 3), (3, 5))
    for c, d in ((0, 1), (1, 70))
    for e, f in ((0, 130), (130, 131), (131, 200))
]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[OpenCheckpoint]]:
    """One tensor in boxes of different cuts, of which one block is kept."""
    weight = experts(5, 70, 200)
    cuts: list[list[Box]] = [columns(weight, 1, [33, 70]), columns(weight, 2, [7, 200]), GRID]
    with small_blocks(BLOCK), ExitStack() as stack:
        paths = [tmp_path_factory.mktemp("cut") / "step" for _ in cuts]
        for path, boxes in zip(paths, cuts, strict=True):
            save_in_boxes(path, "w", weight, boxes)
        yield [stack.enter_context(open_current(path)) for path in paths]


@given(data=st.data())
def test_any_range_and_any_box_of_a_tensor_in_boxes_has_its_bytes(
    cut: list[OpenCheckpoint], data: st.DataObject
) -> None:
    weight = experts(5, 70, 200)
    held = data.draw(st.sampled_from(cut))
    (record,) = held.manifest.tensors
    first, last = sorted(data.draw(st.integers(0, weight.nbytes)) for _ in range(2))
    found = bytearray(last - first)
    if found:
        held.read(record, first, memoryview(found))
    assert bytes(found) == weight.numpy().tobytes()[first:last]
    ends = [sorted(data.draw(st.integers(0, size)) for _ in range(2)) for size in weight.shape]
    index = tuple(slice(low, high) for low, high in ends)
    values = torch.empty_like(weight[index])
    if values.numel():
        view = TensorView(0, 0, weight.dtype, record.shape, None, True)
        held.read_leaf(view, tuple(low for low, _ in ends), values)
    assert torch.equal(values, weight[index])


@given(data=st.data())
def test_windows_hold_every_element_once_in_ranges_that_are_short_and_apart(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=4))
    shape, strides, reach = [], [], 1
    for size, gap in sizes:
        shape.append(size)
        strides.append(reach + gap)
        reach += (size - 1) * (reach + gap)
    order = data.draw(st.permutations(range(len(sizes))))
    shape, strides = [shape[axis] for axis in order], [strides[axis] for axis in order]
    most = data.draw(st.integers(1, 200))
    numbers = torch.arange(max(reach, 1)).as_strided(shape, strides)
    seen: list[int] = []
    before = -1
    for start, part in windows(tuple(shape), tuple(strides), most):
        values = numbers[tuple(slice(a, a + n) for a, n in zip(start, part, strict=True))]
        low, high = int(values.min()), int(values.max())
        assert before < low
        assert high - low < most
        before = high
        seen.extend(values.reshape(-1).tolist())
    assert sorted(seen) == sorted(numbers.reshape(-1).tolist())
    if goes_forward(tuple(shape), tuple(strides)):
        assert numbers.reshape(-1).tolist() == sorted(seen)
