"""The components of parameters as checkpoints see them: row-major tensors that are read and written
piece by piece, wherever their bytes are. Of a partitioned parameter this rank has a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from checkpoint import ChangedTensorError
from checkpoint.tensors.held import HeldSource
from infinity.autograd.versions import HomeWatch
from infinity.parameters.partition import joined
from infinity.values.checkpoint_tensors import CheckpointTensor
from swap.plan.layout import Component
from swap.tiered import TieredState

MASTER_COMPONENTS = ("weight", "lo", "master")
"""What holds the values of a parameter; all other components are state of an optimizer."""
Ranges = tuple[tuple[int, int], ...]


def values_at(start: int, data: memoryview, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """Of bytes from byte ``start`` on, whole elements: the number of the first, and all of them,
    flat, where they lie.
    """
    assert start % dtype.itemsize == 0, "pieces begin with an element"
    values = torch.from_numpy(np.frombuffer(data, dtype=np.uint8)).view(dtype)
    return start // dtype.itemsize, values


@dataclass(frozen=True, slots=True)
class ComponentBytes(HeldSource):
    """One component of one parameter: a ``checkpoint.ByteSource`` and ``ByteSink``. What is saved
    and in host memory, all in a row, is written from where it lies.
    """

    state: TieredState
    leaf: CheckpointTensor
    component: Component
    since: int | None = field(default=None, kw_only=True)
    """What ``state.num_changes`` has to be still when something was read."""
    watch: HomeWatch | None = field(default=None, kw_only=True)
    """Of programs, which can change weights where they are kept."""

    thread_safe: ClassVar[bool] = True
    """Transfers are at offsets, and stripes want several of them at once."""

    @property
    def dtype(self) -> torch.dtype:
        return self.component.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape if self.component.per == 1 else (self.leaf.count(self.component),)

    @property
    def address(self) -> int | None:
        if self.since is None or len(self.leaf.parts) > 1:
            return None
        values = self.state.components.arrays.values(self.leaf.first.index, self.component.name)
        return None if values is None else values.data_ptr()

    @property
    def tells_all(self) -> bool:
        """No program has a way to state of the optimizer where it lies."""
        return self.component.name != "weight"

    def is_there(self) -> bool:
        """Whether no other thread took a step, or loaded, since it was to be read."""
        return self.since is None or self.since == self.state.num_changes

    def changed(self, name: str) -> ChangedTensorError:
        if self.watch is None or self.tells_all:
            return ChangedTensorError(self.leaf.name)
        return self.watch.error_of([part.index for part in self.leaf.parts], self.leaf.name)

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``; whole elements. Raises ``AioError``, and
        ``ChangedTensorError`` where another thread took a step, or loaded, since it was to be.
        """
        for index, first, values in self._kept(start, out):
            self.state.components.read(index, self.component.name, first, values)
        if not self.is_there():
            raise ChangedTensorError(self.leaf.name)

    def check_unchanged(self) -> None:
        """Raises ``ChangedTensorError`` if a program changed what was to be read."""
        if self.watch is not None and self.component.name == "weight":
            self.watch.check(part.index for part in self.leaf.parts)

    def check_ended(self) -> None:
        """The same of changes that were under way then."""
        if self.watch is not None and self.component.name == "weight":
            self.watch.check_ended()

    def write(self, start: int, data: memoryview) -> None:
        """Take ``data`` as the bytes from byte ``start``; whole elements. What other ranks keep is
        ignored. Raises ``AioError``.
        """
        self.state.num_changes += 1
        for index, first, values in self._kept(start, data):
            self.state.components.write(index, self.component.name, first, values)

    def _kept(self, start: int, data: memoryview) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(parameter, first of the values that this rank keeps, where they are in ``data``)."""
        first, values = values_at(start, data, self.dtype)
        for part, low, at, length in self.leaf.split(first, values.numel(), self.component):
            kept = self.component.part(part.first, part.spec.numel)
            begin, end = max(low, kept.start), min(low + length, kept.stop)
            if begin < end:
                yield part.index, begin - kept.start, values[at + begin - low : at + end - low]


@dataclass(frozen=True, slots=True)
class PartBytes(ComponentBytes):
    """The same of a parameter that is partitioned: a ``PartialSource`` or ``PartialSink``."""

    ranges: Ranges

    @property
    def address(self) -> int | None:
        return None  # this rank has not all of it


@dataclass(frozen=True, slots=True)
class BytesOfRank:
    """A tensor that one rank has, as every rank has to name it: bytes, None on the others."""

    numel: int
    values: torch.Tensor | None

    dtype = torch.uint8
    thread_safe = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.numel,)

    @property
    def ranges(self) -> Ranges:
        return () if self.values is None else ((0, self.numel),)

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``."""
        assert self.values is not None
        torch.frombuffer(out, dtype=torch.uint8).copy_(self.values[start : start + len(out)])


@dataclass(frozen=True, slots=True)
class Saving:
    """Every value is saved by one rank: this is which of them."""

    rank: int
    world_size: int
    since: int
    """``num_changes`` of the state that is saved."""
    watch: HomeWatch

    def takes_whole(self, position: int) -> bool:
        """Of a part that every rank has all of, though others of its leaf are partitioned."""
        return position % self.world_size == self.rank


def components_of_tensor(
    state: TieredState, leaf: CheckpointTensor, saving: Saving | None
) -> list[ComponentBytes]:
    """All components of a leaf, the weights first: what ``saving`` saves of them, or (None) all
    that this rank keeps.
    """
    subgroup = state.layout.segments_of[leaf.first.index][0].subgroup
    components = [
        state.components.component(subgroup, name)
        for name in state.component_names(leaf.first.index)
    ]
    since, watch = (None, None) if saving is None else (saving.since, saving.watch)
    if not any(part.is_partitioned for part in leaf.parts):
        return [
            ComponentBytes(state, leaf, component, since=since, watch=watch)
            for component in components
        ]
    return [
        PartBytes(
            state, leaf, component, _ranges(leaf, component, saving), since=since, watch=watch
        )
        for component in components
    ]


def _ranges(leaf: CheckpointTensor, component: Component, saving: Saving | None) -> Ranges:
    found, at = [], 0
    for position, part in enumerate(leaf.parts):
        if part.is_partitioned or saving is None or saving.takes_whole(position):
            kept = component.part(part.first, part.spec.numel)
            found.append((at + kept.start, kept.stop - kept.start))
        at += component.count(part.numel)
    return tuple(joined(found))
