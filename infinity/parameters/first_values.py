"""The values that parameters begin with, handed from where they are found to the tiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from checkpoint.tensors.sources import ByteSource
from infinity.parameters.records import Record


class Values(Protocol):
    """A source of first values."""

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        """Every record with its values, in any order."""

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """The real values of a buffer."""


@runtime_checkable
class ValueSource(Protocol):
    """A path of weights that knows itself how a model gets its values from there."""

    def values_for(self, model: nn.Module, records: Sequence[Record]) -> Values:
        """Raises ``ValueError`` naming what has no values."""


@dataclass(frozen=True, slots=True)
class StoredValues:
    """A tensor, or rows of one, whose values are in a file until they are read.

    ``origin`` tells them from other values, and is the same on every rank that reads the same ones;
    empty where only the bytes can tell. ``master`` has them in float32, where ``source`` has them
    rounded.
    """

    source: ByteSource
    shape: tuple[int, ...]
    origin: str
    master: ByteSource | None = None
    first: int = 0

    def __getitem__(self, rows: slice) -> StoredValues:
        """Rows of it."""
        start, stop, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:])
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            origin=f"{self.origin}[{start}:{stop}]" if self.origin else "",
            first=self.first + start * row,
        )

    def exact(self) -> StoredValues:
        """The same ones in the most precision that they were stored with."""
        return self if self.master is None else replace(self, source=self.master, master=None)

    def part(self, first: int, numel: int) -> StoredValues:
        """Elements ``[first, first + numel)`` in a row."""
        return replace(self, shape=(numel,), first=self.first + first)

    def read(self, first: int, numel: int) -> torch.Tensor:
        """Elements ``[first, first + numel)`` in a row. Raises ``CorruptCheckpointError``,
        ``AioError``.
        """
        out = torch.empty(numel, dtype=self.source.dtype, device="cpu")
        if numel:
            start = (self.first + first) * out.itemsize
            self.source.read(start, out.view(torch.uint8).numpy().data)
        return out

    def pieces(self, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """All of it in a row, ``numel`` elements at a time, each with where it begins."""
        total = math.prod(self.shape)
        for first in range(0, total, numel):
            yield first, self.read(first, min(numel, total - first))

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.read(0, math.prod(self.shape)).view(self.shape)
