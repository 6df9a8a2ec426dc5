"""Blocks of optimizer state, and the slots that they pass through on their way from and to NVMe.

Invariants:
- A slot whose bytes are not on the SSD is *dirty* and keeps its block: a write that failed is
  tried again, and nothing is lost by it.
- A block is written over where it lies. The parameters that belong to it have changed by then, so
  the bytes from before are of no use to anybody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from aio import AioError, Operation
from swap.plan.layout import Component, Segment
from swap.storage.components import as_tensor
from swap.storage.extents import Extent, ExtentStore
from swap.timeline import Timeline


@dataclass(slots=True, eq=False)
class Block:
    """The state of one subgroup, its components one after the other: at home, in a slot, on NVMe.

    ``extent`` is None until the block was first written; the components hold anything then.
    """

    index: int
    segments: tuple[Segment, ...]
    components: tuple[Component, ...]
    numel: int
    home: np.ndarray | None = None
    slot: Slot | None = None
    extent: Extent | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * sum(component.dtype.itemsize for component in self.components)

    def range_of(self, name: str) -> tuple[int, torch.dtype]:
        """First byte of a component, and its dtype."""
        first = 0
        for component in self.components:
            if component.name == name:
                return first, component.dtype
            first += self.numel * component.dtype.itemsize
        raise KeyError(name)

    def component(self, buffer: np.ndarray, name: str) -> torch.Tensor:
        """The elements of a component in ``buffer``."""
        first, dtype = self.range_of(name)
        return as_tensor(buffer[first : first + self.numel * dtype.itemsize], dtype)

    def view(self, buffer: np.ndarray) -> dict[str, torch.Tensor]:
        """All components in ``buffer``."""
        return {
            component.name: self.component(buffer, component.name) for component in self.components
        }


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one block; ``operation`` is the read or write of it that is not yet looked at."""

    buffer: np.ndarray
    block: Block | None = None
    operation: Operation | None = None
    dirty: bool = False

    def is_idle(self) -> bool:
        """Whether no transfer is under way."""
        return self.operation is None or self.operation.done()


class Slots:
    """All slots of a store, and the transfers between them and the SSDs."""

    def __init__(self, timeline: Timeline) -> None:
        self._slots: list[Slot] = []
        self._timeline = timeline
        self.extents: ExtentStore | None = None

    @property
    def slot_bytes(self) -> int:
        """Size of each; 0 when there are none."""
        return int(self._slots[0].buffer.nbytes) if self._slots else 0

    def replace(self, buffers: list[np.ndarray]) -> None:
        """Use ``buffers`` from now on. Raises ``AioError`` where old slots cannot be written."""
        self.settle()
        for slot in self._slots:
            _empty(slot)
        self._slots = [Slot(buffer) for buffer in buffers]

    def start_read(self, block: Block, slot: Slot) -> None:
        """Give the clean ``slot`` to ``block``, and start reading what there is of it."""
        assert not slot.dirty
        _empty(slot)
        slot.block, block.slot = block, slot
        if block.extent is not None:
            assert self.extents is not None
            data = slot.buffer[: block.nbytes]
            read = self.extents.read(block.extent, 0, data, urgent=False)
            slot.operation = self._timeline.watch(read, f"state {block.index}", purpose="state")

    def start_write(self, slot: Slot) -> None:
        """Start writing what the dirty ``slot`` holds. Raises ``AioError`` when a disk is full."""
        block = slot.block
        assert block is not None
        assert slot.operation is None
        assert self.extents is not None
        if block.extent is None:
            block.extent = self.extents.allocate(block.nbytes)
        write = self.extents.write(block.extent, 0, slot.buffer[: block.nbytes])
        slot.operation = self._timeline.watch(write, f"state {block.index}", purpose="state")

    def wait(self, slot: Slot) -> None:
        """Wait for the transfer of ``slot``. Raises its ``AioError``: a read leaves the slot empty
        then, a write leaves it dirty, to be written elsewhere.
        """
        operation, block = slot.operation, slot.block
        if operation is None:
            return
        assert block is not None
        try:
            self._result(operation, block)
        except AioError:
            slot.operation = None
            if operation.request.kind == "read":
                _empty(slot)
            else:
                self._move(block)
            raise
        slot.operation = None
        if operation.request.kind == "write":
            slot.dirty = False

    def free_one(self, busy: Collection[Slot], *, wait: bool) -> Slot | None:
        """A clean slot that is not ``busy``; with ``wait`` one is made clean if need be."""
        idle = [slot for slot in self._slots if slot not in busy]
        for slot in idle:
            if slot.is_idle():
                self.wait(slot)
                if not slot.dirty:
                    return slot
        if not wait:
            return None
        slot = next((slot for slot in idle if slot.operation is not None), idle[0])
        self._clean(slot)
        return slot

    def settle(self) -> None:
        """Write what is dirty, wait for everything. Raises ``AioError``; a further call retries."""
        for slot in self._slots:
            self.wait(slot)
            if slot.dirty:
                self.start_write(slot)
        for slot in self._slots:
            self.wait(slot)

    def let_end(self) -> None:
        """Wait for all transfers, whatever comes of them."""
        for slot in self._slots:
            if slot.operation is not None:
                _let_end(slot.operation)
                slot.operation = None

    def _clean(self, slot: Slot) -> None:
        self.wait(slot)
        if slot.dirty:
            self.start_write(slot)
            self.wait(slot)

    def _result(self, operation: Operation, block: Block) -> None:
        if operation.done():
            operation.result()
            return
        with self._timeline.span("stall", label=f"state {block.index}"):
            operation.result()

    def _move(self, block: Block) -> None:
        """What could not be written here shall be written elsewhere."""
        assert self.extents is not None
        assert block.extent is not None
        self.extents.release(block.extent)
        block.extent = None


def _empty(slot: Slot) -> None:
    if slot.block is not None:
        slot.block.slot = None
    slot.block = None


def _let_end(operation: Operation) -> None:
    try:
        operation.result()
    except AioError:
        return
