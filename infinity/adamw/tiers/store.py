"""Optimizer state in host memory and on NVMe, brought past the parameters once a step.

State that is not at home in host memory passes through slots. A *sweep* reads ahead into free
slots, hands over the oldest block that has arrived, and writes it back while the next one is at
work; blocks at home are worked on while nothing has arrived. The caller's thread computes, the
engine's threads transfer.

Sweeps run back and forth. What a sweep leaves in the slots stays there unwritten, and the next one
begins with it, so the memory of the slots spares traffic as memory at home does. Follows
MLP-Offload in the alternating order; between sweeps nothing is in flight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from aio import Engine, Operation, Slab
from infinity.adamw.tiers.blocks import Block, Slot, Slots
from infinity.adamw.tiers.placement import HostMemory, StatePlacement, checkpoint_bytes, place_state
from swap.plan.layout import PASSAGE_BYTES, ParameterSpec, Segment
from swap.plan.rules import UpdateRule
from swap.storage.bandwidth import shares
from swap.storage.components import as_bytes
from swap.storage.directory import SwapDirectory
from swap.storage.extents import ExtentStore
from swap.storage.passage import Passage
from swap.tiers import Tier
from swap.timeline import Timeline
from swap.undo import Undo

Work = Callable[[Sequence[Segment], Mapping[str, torch.Tensor]], None]
"""Updates the segments of one block; the components are those of the whole block."""


class StateStore:
    """The components that a rule keeps beside weights, for parameters known by number.

    ``directories`` share the load by their bandwidth, as far as that was measured and kept.
    One thread at a time, but for ``read`` and ``write``.
    """

    def __init__(self, rule: UpdateRule, directories: Sequence[str], host_bytes: int) -> None:
        self.timeline = Timeline()
        self.budget_bytes = host_bytes
        self.checkpoint_bytes = checkpoint_bytes(host_bytes)
        self.host_bytes = self.checkpoint_bytes + PASSAGE_BYTES
        self.nvme_bytes = 0
        self._rule = rule
        self._directories = directories
        self._blocks: list[Block] = []
        self._parts: list[list[tuple[Block, Segment]]] = []
        self._slots = Slots(self.timeline)
        self._passage: Passage | None = None
        self._ascending = True
        self._filling = threading.Lock()
        self._undo = Undo()

    @property
    def extents(self) -> ExtentStore | None:
        """Where blocks lie on the SSDs; None while all are at home in host memory."""
        return self._slots.extents

    @property
    def num_parameters(self) -> int:
        """How many have room; the next one gets this number."""
        return len(self._parts)

    def add(self, specs: Sequence[ParameterSpec], *, caller_bytes: int = 0) -> None:
        """Make room for the state of more parameters; they get the next numbers, ``specs`` count
        from 0.

        ``caller_bytes`` of host memory are set aside for the caller. Raises ``BudgetError``,
        ``AioError`` (ENOSPC) and what a directory that cannot be used raises; nothing has changed
        then.
        """
        memory = HostMemory(
            budget_bytes=self.budget_bytes,
            taken_bytes=self.host_bytes + caller_bytes,
            slot_bytes=self._slots.slot_bytes,
        )
        placement = place_state(specs, self._rule, memory)
        if placement.nvme_bytes:
            self._reserve(self.nvme_bytes + placement.nvme_bytes)
        self._take(placement, self._new_blocks(placement))
        self.host_bytes += placement.host_bytes + caller_bytes
        self.nvme_bytes += placement.nvme_bytes

    def blocks_of(self, parameter: int) -> tuple[int, ...]:
        """The blocks that hold the state of ``parameter``."""
        return tuple(block.index for block, _ in self._parts[parameter])

    def sweep(self, left: set[int], work: Work) -> None:
        """Call ``work`` with every block of ``left``; each is taken out of it when that returns.

        Raises ``AioError``, and what ``work`` raises; ``left`` then holds the blocks that remain.
        The components of a block hold anything until they are first written to.
        """
        order = self._order(left)
        at_home = deque(block for block in order if block.home is not None)
        ahead = deque(block for block in order if block.home is None)
        arriving: deque[Slot] = deque()
        while at_home or ahead or arriving:
            self._read_ahead(ahead, arriving, wait=not at_home)
            if at_home and not (arriving and arriving[0].is_idle()):
                block = at_home.popleft()
                assert block.home is not None
                self._work(block, block.home, left, work)
                continue
            slot = arriving.popleft()
            self._slots.wait(slot)
            assert slot.block is not None
            slot.dirty = True
            self._work(slot.block, slot.buffer, left, work)
            if ahead:
                self._slots.start_write(slot)
        self._ascending = not self._ascending

    def settle(self) -> None:
        """Bring everything home. Raises ``AioError``; a further call tries again."""
        self._slots.settle()

    def read(self, parameter: int, name: str, start: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, start + len(out))`` of a component into ``out``, flat, on the
        CPU.

        For a settled store; several threads may call. Raises ``AioError``.
        """
        for block, low, part in self._overlaps(parameter, start, out):
            memory = _memory_of(block)
            if memory is not None:
                part.copy_(block.component(memory, name)[low : low + part.numel()])
            else:
                self._transfer("read", block, name, low, part)

    def write(self, parameter: int, name: str, start: int, values: torch.Tensor) -> None:
        """Set elements ``[start, start + len(values))`` of a component.

        For a settled store; several threads may write different elements. Raises ``AioError``.
        """
        for block, low, part in self._overlaps(parameter, start, values):
            memory = _memory_of(block)
            if memory is not None:
                block.component(memory, name)[low : low + part.numel()].copy_(part)
                if block.slot is not None:
                    block.slot.dirty = True
                continue
            with self._filling:
                if block.extent is None:
                    assert self.extents is not None
                    block.extent = self.extents.allocate(block.nbytes)
            self._transfer("write", block, name, low, part)

    def close(self) -> None:
        """Remove the swap files. Idempotent; raises nothing that happened in the background."""
        self._slots.let_end()
        self._undo.close()

    # Making room.

    def _reserve(self, nbytes: int) -> None:
        if self.extents is None:
            undo = Undo()
            self._undo.push(undo.__exit__)
            try:
                lanes = ExtentStore.LANES_PER_DIRECTORY * len(self._directories)
                engine = undo.enter_context(Engine(lanes=lanes))
                opened = []
                for directory in self._directories:
                    opened.append(SwapDirectory(directory, engine))
                    undo.callback(opened[-1].close)
                extents = ExtentStore(opened, engine, shares=shares(self._directories))
                extents.reserve(nbytes)
                slab = Slab(PASSAGE_BYTES)
                undo.callback(slab.close)
                self._slots.extents, self._passage = extents, Passage(slab)
            except BaseException:
                undo.close()
                raise
        else:
            self.extents.reserve(nbytes)

    def _new_blocks(self, placement: StatePlacement) -> list[Block]:
        base = len(self._parts)
        return [
            Block(
                index=len(self._blocks) + group.index,
                segments=tuple(replace(s, parameter=base + s.parameter) for s in group.segments),
                components=self._rule.components(group.dtype),
                numel=group.numel,
            )
            for group in placement.layout.subgroups
        ]

    def _take(self, placement: StatePlacement, blocks: list[Block]) -> None:
        if placement.host_bytes:
            slab = Slab(placement.host_bytes)
            self._undo.callback(slab.close)
            if placement.num_slots:
                sizes = [placement.slot_bytes] * placement.num_slots
                self._slots.replace([slab.allocate(nbytes) for nbytes in sizes])
            for block, home in zip(blocks, placement.homes, strict=True):
                if home is Tier.HOST:
                    block.home = slab.allocate(block.nbytes)
        base = len(self._parts)
        parts: list[list[tuple[Block, Segment]]] = [[] for _ in placement.layout.specs]
        for block in blocks:
            for segment in block.segments:
                parts[segment.parameter - base].append((block, segment))
        self._blocks += blocks
        self._parts += parts

    # Sweeping.

    def _order(self, left: set[int]) -> list[Block]:
        """Cached blocks first, then along the direction of this sweep."""
        sign = 1 if self._ascending else -1
        blocks = (self._blocks[index] for index in left)
        return sorted(blocks, key=lambda block: (block.slot is None, sign * block.index))

    def _read_ahead(self, ahead: deque[Block], arriving: deque[Slot], *, wait: bool) -> None:
        while ahead:
            block = ahead[0]
            if block.slot is None:
                slot = self._slots.free_one(arriving, wait=wait and not arriving)
                if slot is None:
                    return
                self._slots.start_read(block, slot)
            assert block.slot is not None
            arriving.append(block.slot)
            ahead.popleft()

    def _work(self, block: Block, buffer: np.ndarray, left: set[int], work: Work) -> None:
        with self.timeline.span("kernel", label=f"state {block.index}"):
            work(block.segments, block.view(buffer))
        left.discard(block.index)

    # Values in and out.

    def _overlaps(
        self, parameter: int, start: int, tensor: torch.Tensor
    ) -> Iterator[tuple[Block, int, torch.Tensor]]:
        """(block, first element in its components, slice of ``tensor``) for all that the range
        touches.
        """
        stop = start + tensor.numel()
        for block, segment in self._parts[parameter]:
            low = max(start, segment.start)
            high = min(stop, segment.start + segment.length)
            if low < high:
                yield (
                    block,
                    segment.offset + low - segment.start,
                    tensor[low - start : high - start],
                )

    def _transfer(self, kind: str, block: Block, name: str, first: int, part: torch.Tensor) -> None:
        """Bring ``part`` there or back, through the passage. Raises ``AioError``."""
        assert self.extents is not None
        assert block.extent is not None
        assert self._passage is not None
        component, dtype = block.range_of(name)
        start = component + first * dtype.itemsize
        extents, extent, memory = self.extents, block.extent, as_bytes(part)

        def transfer(at: int, buffer: np.ndarray) -> Operation:
            if kind == "read":
                return extents.read(extent, start + at, buffer, urgent=True)
            return extents.write(extent, start + at, buffer)

        way = self._passage.read if kind == "read" else self._passage.write
        extents.run_drained(partial(way, start, memory, transfer))


def _memory_of(block: Block) -> np.ndarray | None:
    """Where the block is in host memory now, if it is."""
    if block.home is not None:
        return block.home
    return None if block.slot is None else block.slot.buffer
