"""Where loaded bytes go: tensors of any strides on any device, and byte sinks.

A target stands for a whole row-major tensor and gives a place for each box of it. Places are
written from several threads at once, each byte by one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from checkpoint.format.slices import (
    Shape,
    contiguous_strides,
    elements_before,
    flat_first,
    range_boxes,
)
from checkpoint.outside import carrying, outside
from checkpoint.tensors.sources import ByteSink, PartialSink, integer_view, is_plain
from checkpoint.tensors.turns import Transfer, in_turn


class Place(NamedTuple):
    """Where the bytes of one box go: to an address, if they lie in a row there, else to a function.

    `deliver(first, data)` takes bytes of the row-major box from byte `first` on.
    """

    address: int | None
    deliver: Callable[[int, memoryview], None] | None


class Target(Protocol):
    """What a stored tensor is loaded into."""

    def place(self, start: Shape, shape: Shape) -> Place: ...

    def wanted(self, start: Shape, shape: Shape) -> list[tuple[int, int]]:
        """Bytes [first, last) of a box that are to be read, in the order of their beginnings."""
        ...


class TensorTarget(NamedTuple):
    """A tensor in memory, of any strides, on any device; what is stored as `saved` is converted.

    `address` is that of host memory in which the bytes lie in a row as they are stored.
    """

    tensor: torch.Tensor
    saved: torch.dtype
    address: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor, saved: torch.dtype | None = None) -> TensorTarget:
        """`saved`: None for what is stored as it is in memory."""
        if saved is not None and saved != tensor.dtype:
            return cls(tensor, saved, None)
        in_a_row = tensor.is_cpu and tensor.is_contiguous() and is_plain(tensor)
        return cls(tensor, tensor.dtype, tensor.data_ptr() if in_a_row else None)

    def wanted(self, start: Shape, shape: Shape) -> list[tuple[int, int]]:
        return [(0, math.prod(shape) * self.saved.itemsize)]

    def place(self, start: Shape, shape: Shape) -> Place:
        part = self.tensor
        if shape == part.shape:
            if self.address is not None:  # as most have
                return Place(self.address, None)
        else:
            for axis, (low, size) in enumerate(zip(start, shape, strict=True)):
                part = part.detach().narrow(axis, low, size)
        if self.saved != part.dtype:
            return Place(None, BoxWriter(part.detach(), shape, self.saved))
        if self.address is not None and part.is_contiguous():
            return Place(part.data_ptr(), None)
        part = integer_view(part.detach())
        return Place(None, BoxWriter(part, shape, part.dtype))


@dataclass(frozen=True, slots=True)
class BoxWriter:
    part: torch.Tensor
    shape: Shape
    dtype: torch.dtype

    @carrying
    def __call__(self, first_byte: int, data: memoryview) -> None:
        self.copy(first_byte, data, _copy)

    def copy(
        self,
        first_byte: int,
        data: memoryview,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Has `copy` write parts of `data`, its second argument, to parts of the tensor."""
        assert first_byte % self.dtype.itemsize == 0, "pieces begin with an element"
        flat = torch.frombuffer(data, dtype=self.dtype)
        first = first_byte // self.dtype.itemsize
        done = 0
        # A reader's thread is not in the mode of the caller, whose tensor this may be.
        with torch.inference_mode(self.part.is_inference()), torch.no_grad():
            for slices, shape in range_boxes(self.shape, first, first + flat.numel()):
                count = math.prod(shape)
                copy(*_once(self.part[slices], flat[done : done + count].view(shape)))
                done += count


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)


def _once(target: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies at one place, by strides of 0, had one value, and is written once."""
    for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    return target, values


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """A byte sink; a box that is no gapless range of the whole is handed over row by row."""

    sink: ByteSink
    shape: Shape
    itemsize: int
    write: Transfer

    @classmethod
    def of(cls, sink: ByteSink, shape: Shape, itemsize: int) -> SinkTarget:
        """Calls of one sink take turns."""
        with outside():
            write = sink.write
        return cls(sink, shape, itemsize, carrying(in_turn(sink, write)))

    def wanted(self, start: Shape, shape: Shape) -> list[tuple[int, int]]:
        """Bytes [first, last) of a box that the sink takes."""
        if not isinstance(self.sink, PartialSink):
            return [(0, math.prod(shape) * self.itemsize)]
        found = []
        for begin, length in self.sink.ranges:
            low, high = (
                elements_before(self.shape, start, shape, edge) * self.itemsize
                for edge in (begin, begin + length)
            )
            if low < high:
                found.append((low, high))
        return sorted(found)

    def place(self, start: Shape, shape: Shape) -> Place:
        first = flat_first(self.shape, start, shape)
        if first is None:
            return Place(None, _RowWriter(self, start, shape))
        base = first * self.itemsize
        return Place(None, lambda first_byte, data: self.write(base + first_byte, data))


def takes_all(target: Target) -> bool:
    """Whether a stored tensor is read whole for it."""
    if isinstance(target, SinkTarget):
        return not isinstance(target.sink, PartialSink)
    return isinstance(target, TensorTarget)


@dataclass(frozen=True, slots=True)
class _RowWriter:
    target: SinkTarget
    start: Shape
    shape: Shape

    def __call__(self, first_byte: int, data: memoryview) -> None:
        itemsize = self.target.itemsize
        strides = contiguous_strides(self.target.shape)
        assert first_byte % itemsize == 0, "pieces begin with an element"
        first = first_byte // itemsize
        done = 0
        for slices, shape in range_boxes(self.shape, first, first + len(data) // itemsize):
            row_bytes = shape[-1] * itemsize
            low = [start + part.start for start, part in zip(self.start, slices, strict=True)]
            for index in itertools.product(*(range(size) for size in shape[:-1])):
                place = sum(
                    (begin + step) * stride
                    for begin, step, stride in zip(low, (*index, 0), strides, strict=True)
                )
                self.target.write(place * itemsize, data[done : done + row_bytes])
                done += row_bytes
