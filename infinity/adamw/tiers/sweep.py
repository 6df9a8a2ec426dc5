"""Passes of optimizer state by the parameters that it belongs to, which are the program's.

State that is not at home in host memory goes through staging slots, as in every update (see
``swap.update.staging``): it is read ahead into free ones, worked on as it arrives, and written
while the next one is worked on; what is at home is worked on while nothing has arrived. The thread
of the caller computes, those of the engine transfer.

Passes run back and forth. What is last in the slots stays there, unwritten, and the next pass
begins with it, so slots spare as much traffic as memory at home does. Follows MLP-Offload in the
alternating order; between passes nothing is read.

Invariant: the work changes parameters for good, so from its beginning on a slot is the only place
of that state. It is *kept* until it is published: a write that failed is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from swap.plan.layout import Segment
from swap.timeline import Timeline
from swap.update.staging import Staged, Staging

Work = Callable[[Sequence[Segment], Mapping[str, torch.Tensor]], None]
"""Updates the segments of one subgroup; the components are those of the whole subgroup."""
Expect = Callable[[Sequence[Segment]], object]
"""Hears of each subgroup before the work on the one before it begins, in the order of the work."""


@dataclass(slots=True, eq=False)
class StateGroup:
    """A subgroup of state as number ``number`` of a store, where its ``segments`` name parameters
    by their numbers.
    """

    number: int
    segments: tuple[Segment, ...]
    staged: Staged
    staging: Staging[Staged]
    is_home: bool

    @property
    def is_read(self) -> bool:
        return self.staging.is_read(self.staged)


class Sweeps:
    """The staging slots of a store, and what is in them. Used by one thread at a time."""

    def __init__(self, timeline: Timeline) -> None:
        self.free_slots: deque[np.ndarray] = deque()
        """Shared with the staging of every subgroup."""
        self._timeline = timeline
        self._kept: list[StateGroup] = []
        self._writing: deque[StateGroup] = deque()
        self._ascending = True

    def replace_slots(self, slots: Iterable[np.ndarray]) -> None:
        """Use ``slots`` from now on. Raises ``AioError`` where the old ones cannot be written."""
        self.flush()
        self.free_slots.clear()
        self.free_slots.extend(slots)

    def sweep(
        self,
        groups: Iterable[StateGroup],
        left: set[int],
        work: Work,
        expect: Expect | None = None,
    ) -> None:
        """Call ``work`` with each of ``groups``; its number is taken out of ``left`` when that
        returns. With ``expect`` it is settled a subgroup ahead which one comes next. Raises
        ``AioError``, and what ``work`` and ``expect`` raise.
        """
        order = self._order(groups)
        at_home = deque(group for group in order if group.is_home)
        ahead = deque(group for group in order if not group.is_home)
        reading: deque[StateGroup] = deque()
        following: StateGroup | None = None
        try:
            while at_home or ahead or reading or following:
                self._start_reads(ahead, reading, wait=not (at_home or following))
                group = following or self._choose(at_home, reading, expect)
                assert group is not None
                following = self._choose(at_home, reading, expect, now=group) if expect else None
                if group.is_home:
                    group.staging.start(group.staged)
                else:
                    self._take(group, reading)
                self._work(group, left, work)
        finally:
            for group in reading:
                if group not in self._kept:
                    group.staging.abandon(group.staged)
        self._ascending = not self._ascending

    def flush(self) -> None:
        """Bring everything home. Raises ``AioError``; a further call tries again."""
        for group in [*self._kept]:
            self._start_write(group)
        while self._writing:
            self._publish(self._writing[0])

    def let_end(self) -> None:
        """Wait for all transfers, whatever comes of them."""
        for group in self._writing:
            group.staging.undo_write(group.staged)

    def _choose(
        self,
        at_home: deque[StateGroup],
        reading: Sequence[StateGroup],
        expect: Expect | None,
        now: StateGroup | None = None,
    ) -> StateGroup | None:
        """What to work on next, or after ``now``: what has arrived, or else what is at home, or
        else what was begun first. It stays among ``reading`` until it is worked on.
        """
        others = [group for group in reading if group is not now]
        group = next((group for group in others if group.is_read), None)
        if group is None:
            group = at_home.popleft() if at_home else next(iter(others), None)
        if expect and group is not None:
            expect(group.segments)
        return group

    def _order(self, groups: Iterable[StateGroup]) -> list[StateGroup]:
        """What is in slots first, then along the direction of this pass."""
        sign, in_slots = 1 if self._ascending else -1, {*self._kept, *self._writing}
        return sorted(groups, key=lambda group: (group not in in_slots, sign * group.number))

    def _start_reads(
        self, ahead: deque[StateGroup], reading: deque[StateGroup], *, wait: bool
    ) -> None:
        while ahead:
            group = ahead[0]
            if group in self._writing:  # since the pass before
                self._take_back(group)
            if group not in self._kept:
                if not self._has_room(reading, wait=wait and not reading):
                    return
                group.staging.start(group.staged)
            reading.append(ahead.popleft())

    def _has_room(self, reading: Sequence[StateGroup], *, wait: bool) -> bool:
        """Whether a slot is free. If none is, what others keep is written, and with ``wait`` waited
        for.
        """
        for group in [*self._writing]:
            if group.staging.is_written(group.staged):
                self._publish(group)
        if not self.free_slots:
            for group in [*self._kept]:
                if group not in reading:
                    self._start_write(group)
            if wait:
                self._publish(self._writing[0])
        return bool(self.free_slots)

    def _take(self, group: StateGroup, reading: deque[StateGroup]) -> None:
        """It is read, and kept from now on."""
        with self._stall(group, is_over=group.is_read):
            group.staging.finish_read(group.staged)
        if group not in self._kept:
            self._kept.append(group)
        reading.remove(group)

    def _work(self, group: StateGroup, left: set[int], work: Work) -> None:
        with self._timeline.span("kernel", label=f"state {group.number}"):
            work(group.segments, group.staged.components)
        left.discard(group.number)

    def _start_write(self, group: StateGroup) -> None:
        try:
            group.staging.start_write(group.staged)
        except BaseException:
            group.staging.undo_write(group.staged)
            raise
        self._kept.remove(group)
        self._writing.append(group)

    def _take_back(self, group: StateGroup) -> None:
        """It stays in its slot, and is written when it was worked on again."""
        group.staging.undo_write(group.staged)
        self._writing.remove(group)
        self._kept.append(group)

    def _publish(self, group: StateGroup) -> None:
        """Raises ``AioError`` where it could not be written; it is kept then, to be written
        elsewhere.
        """
        self._writing.remove(group)
        try:
            with self._stall(group, is_over=group.staging.is_written(group.staged)):
                group.staging.publish(group.staged)
        except BaseException:
            group.staging.undo_write(group.staged)
            self._kept.append(group)
            raise

    def _stall(self, group: StateGroup, *, is_over: bool) -> AbstractContextManager[None]:
        if is_over:
            return nullcontext()
        return self._timeline.span("stall", label=f"state {group.number}")
