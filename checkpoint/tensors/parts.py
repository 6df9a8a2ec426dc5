"""Parts of stored tensors: what is loaded of one of which views alone are wanted.

A view whose elements fill a gapless range of a tensor that is stored row by row is read as that
range of bytes, into memory of its own. All ranges of one tensor are read together, so that no
bytes are read twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from checkpoint.format.checksum import copy_ranges
from checkpoint.format.records import Manifest, TensorRecord
from checkpoint.format.slices import Shape, contiguous_strides, flat_first, is_dense
from checkpoint.tensors.assembly import TensorView
from checkpoint.tensors.targets import Place, Target, TensorTarget

_WINDOW_ALIGNMENT = 4096
"""Windows begin at pages, so that devices can read into them directly."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [first, first + nbytes) of a row-major tensor, and where they go."""

    first: int
    nbytes: int
    place: Place


class PartsTarget:
    """A target that takes parts of a stored tensor, which may overlap."""

    def __init__(self, record: TensorRecord, parts: Iterable[Part]) -> None:
        self._record = record
        self._parts = sorted(parts, key=lambda part: part.first)
        self._firsts = [part.first for part in self._parts]
        # Of all parts up to each: it grows, which the ends themselves need not do.
        self._lasts = list(accumulate((part.first + part.nbytes for part in self._parts), max))

    def wanted(self, start: Shape, shape: Shape) -> list[tuple[int, int]]:
        """Bytes [first, last) of a chunk to read, in their order; parts may overlap."""
        base, nbytes = self._range(start, shape)
        ranges: list[tuple[int, int]] = []
        for part in self._overlapping(base, base + nbytes):
            low = max(part.first - base, 0)
            high = min(part.first + part.nbytes - base, nbytes)
            if low < high:
                ranges.append((low, high))
        return ranges

    def place(self, start: Shape, shape: Shape) -> Place:
        base, _ = self._range(start, shape)
        if len(self._parts) == 1 and self._parts[0].place.address is not None:
            return Place(self._parts[0].place.address + base - self._parts[0].first, None)
        return Place(None, lambda first, data: self._deliver(base + first, data))

    def _range(self, start: Shape, shape: Shape) -> tuple[int, int]:
        first = flat_first(self._record.shape, start, shape)
        assert first is not None, "`can_take_parts` has looked at every chunk"
        itemsize = self._record.element.itemsize
        return first * itemsize, math.prod(shape) * itemsize

    def _overlapping(self, first: int, last: int) -> Sequence[Part]:
        """Parts that may have bytes of a range: all that do are among them."""
        return self._parts[bisect_right(self._lasts, first) : bisect_left(self._firsts, last)]

    def _deliver(self, first: int, data: memoryview) -> None:
        """Hands bytes of the stored tensor, from byte `first` on, to every part that has some."""
        last = first + len(data)
        for part in self._overlapping(first, last):
            low, high = max(first, part.first), min(last, part.first + part.nbytes)
            if low >= high:
                continue
            piece = data[low - first : high - first]
            if part.place.deliver is not None:
                part.place.deliver(low - part.first, piece)
            elif part.place.address is not None:
                origin = np.frombuffer(piece, np.uint8).ctypes.data
                copy_ranges([origin], [part.place.address + low - part.first], [high - low])


def part_of_view(record: TensorRecord, view: TensorView, target: Target) -> Part | None:
    """What a target takes of a stored tensor of which it is a view; None if that is no range."""
    nbytes = math.prod(view.shape) * view.dtype.itemsize
    if not can_take_parts(record, view.offset, view.dtype.itemsize):
        return None
    shape = view.shape
    if not view.is_row_major:
        strides = view.strides or contiguous_strides(shape)
        if not isinstance(target, TensorTarget) or not is_dense(shape, strides):
            return None
        # In the order of its dimensions in memory the view is row-major.
        order = sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -strides[axis]))
        target = TensorTarget.of(target.tensor.detach().permute(order))
        shape = tuple(shape[axis] for axis in order)
    return Part(view.offset, nbytes, target.place((0,) * len(shape), shape))


def can_take_parts(record: TensorRecord, offset: int, itemsize: int) -> bool:
    """Whether what is read of a tensor, in pieces, are ranges of it in whole elements of a view."""
    if record.strides is not None or offset % itemsize:
        return False
    for chunk in record.chunks:
        first = flat_first(record.shape, chunk.start, chunk.shape)
        if first is None or first * record.element.itemsize % itemsize:
            return False
    return True


Window = tuple[int, int]
"""Bytes [first, last) of a stored tensor."""


def windows_of(manifest: Manifest, views: Iterable[TensorView]) -> dict[int, Window]:
    """What has to be in memory of stored tensors, by index, for views of them to share it: of those
    only that are not wanted as a whole.
    """
    found: dict[int, list[TensorView]] = {}
    for view in views:
        found.setdefault(view.tensor, []).append(view)
    windows: dict[int, Window] = {}
    for index, own in found.items():
        record = manifest.tensors[index]
        if record.storage is not None or any(view.is_whole for view in own):
            continue
        if can_take_parts(record, 0, 1):
            first = min(view.offset for view in own) // _WINDOW_ALIGNMENT * _WINDOW_ALIGNMENT
            windows[index] = first, max(view.offset + view.reach_bytes for view in own)
    return windows


def window_target(record: TensorRecord, window: Window, memory: torch.Tensor) -> PartsTarget:
    """The target of a window, whose memory is a flat tensor of bytes."""
    first, last = window
    place = TensorTarget.of(memory).place((0,), (last - first,))
    return PartsTarget(record, [Part(first, last - first, place)])


def targets_of(
    manifest: Manifest, tensors: Mapping[int, torch.Tensor], windows: Mapping[int, Window]
) -> dict[int, Target]:
    """Where stored tensors go that an `Assembler` with these windows has made memory for."""
    return {
        index: window_target(manifest.tensors[index], windows[index], tensor)
        if index in windows
        else TensorTarget.of(tensor, manifest.tensors[index].element.torch)
        for index, tensor in tensors.items()
    }
