"""Boxes of stored tensors into live tensors, which may be of another dtype.

A box is picked out of the bytes of its chunk as they come by, so that nothing but the staging
memory of the load is needed beside the target, whatever the box cuts across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.slices import (
    Shape,
    box_ranges,
    contiguous_strides,
    flat_first,
    gapless_ranges,
    merged,
    offsets_of,
    range_boxes,
    span_elements,
)
from checkpoint.tensors.sources import ByteSource, integer_view, memory_fault
from checkpoint.tensors.targets import Place, TensorTarget


def place_of_box(box: BoxPicker) -> Place:
    """Where the bytes of the box's chunk go: straight into the target where they can."""
    target, shape = box.target, tuple(box.target.shape)
    first = flat_first(box.whole, box.start, shape)
    if target.dtype == box.dtype and first is not None:
        place = TensorTarget.of(target).place((0,) * len(shape), shape)
        if place.address is not None:
            return Place(place.address - first * box.dtype.itemsize, None)
    return Place(None, box)


def reads_of_box(box: BoxPicker, unit: int) -> list[tuple[int, int, Place]]:
    """Which bytes [first, last) of its chunk bring a box, and where they go. They have no unit of
    so many bytes in common, and of what lies between the box's rows no more than such units take.
    """
    shape, itemsize = tuple(box.target.shape), box.dtype.itemsize
    ranges = box_ranges(box.whole, box.start, shape, (ALIGNMENT - 1) // itemsize)
    found = merged([(first * itemsize, last * itemsize) for first, last in ranges], unit)
    if len(found) == 1:
        return [(*found[0], place_of_box(box))]
    rows, _ = gapless_ranges(box.whole, shape)
    row = TensorTarget.of(box.target[(0,) * rows])
    is_by_row = len(found) == len(ranges) == math.prod(shape[:rows])
    if not is_by_row or row.address is None or box.target.dtype != box.dtype:
        return [(first, last, Place(None, box)) for first, last in found]
    offsets = offsets_of(shape[:rows], box.target.stride())
    return [
        (first, last, Place(row.address + offset * itemsize - first, None))
        for (first, last), offset in zip(found, offsets, strict=True)
    ]


def read_box(source: ByteSource, box: BoxPicker) -> None:
    """Reads a box of what `source` gives, a checksum block's length at a time."""
    first, last = box.span
    for low in range(first, last, CRC_BLOCK_BYTES):
        raw = np.empty(min(CRC_BLOCK_BYTES, last - low), np.uint8)
        source.read(low, raw.data)
        box(low, raw.data)


def check_target(target: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Raises TypeError naming the entry for a target that cannot take values of `dtype`."""
    is_strided = target.layout == torch.strided and not target._is_zerotensor()
    if target.is_meta or not is_strided or target.is_quantized:
        raise TypeError(f"{name} has no plain memory to load into; give a strided tensor")
    fault = memory_fault(target)
    if fault is not None:
        raise TypeError(f"{name} is a tensor {fault}")
    if target.dtype == dtype:
        return
    try:
        torch.empty(1, dtype=target.dtype, device="cpu").copy_(
            torch.empty(1, dtype=dtype, device="cpu")
        )
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(
            f"{name} is {target.dtype}, the checkpoint holds {dtype}, and torch does not convert "
            f"one into the other; give a tensor of {dtype}"
        ) from error


@dataclass(frozen=True, slots=True)
class BoxPicker:
    """Takes bytes of a row-major chunk of shape `whole` and `dtype`; the box at `start` that is as
    large as `target` goes there, converted if that is of another dtype.
    """

    target: torch.Tensor
    dtype: torch.dtype
    whole: Shape
    start: Shape

    @property
    def span(self) -> tuple[int, int]:
        """Bytes [first, last) of its chunk from the first to the last element of the box."""
        strides, shape = contiguous_strides(self.whole), tuple(self.target.shape)
        first = sum(low * step for low, step in zip(self.start, strides, strict=True))
        itemsize = self.dtype.itemsize
        return first * itemsize, (first + span_elements(shape, strides)) * itemsize

    def __call__(self, first_byte: int, data: memoryview) -> None:
        target = self.target
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)
        if target.dtype == self.dtype:
            target = integer_view(target)
            flat = flat.view(target.dtype)
        assert first_byte % self.dtype.itemsize == 0, "pieces begin with an element"
        first = first_byte // self.dtype.itemsize
        done = 0
        with torch.no_grad():
            for slices, shape in range_boxes(self.whole, first, first + flat.numel()):
                count = math.prod(shape)
                met = self._met(slices)
                if met is not None:
                    inside, place = met
                    target[place].copy_(flat[done : done + count].view(shape)[inside])
                done += count

    def _met(self, slices: Sequence[slice]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """What a part of the chunk shares with the box: its place in the part, and in the box."""
        inside, place = [], []
        for part, low, size in zip(slices, self.start, self.target.shape, strict=True):
            first, last = max(part.start, low), min(part.stop, low + size)
            if first >= last:
                return None
            inside.append(slice(first - part.start, last - part.start))
            place.append(slice(first - low, last - low))
        return tuple(inside), tuple(place)
