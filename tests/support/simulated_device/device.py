"""A compute device that is host memory, and does what it is given as late as it may.

A copy is carried out when somebody waits for it, on the host or on a stream that computes, or, by a
seed, at any other moment that the order allows. Operations of torch run at once, where they are
called, so that they come as early as they can. What no copy has filled yet is poison.

Whatever came out, each access is compared with those before it by vector clocks (``order``): one
that has to come after another, and was not made to, is an ``OrderError``, in the call that makes
it, and again in ``check``, if a thread of ours has kept the first.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aio import Slab
from swap.device.interface import Stream
from tests.support.simulated_device.copies import Copy, End, Queue, Turn
from tests.support.simulated_device.memory import POISON, Block, Range, Shown, Storage, finalizer
from tests.support.simulated_device.order import Clock, OrderError, Region, SimulatedEvent, merge

_CHANCES = (0.0, 0.1, 0.5, 0.9)
_NEVER = 0.0
_AT_ONCE = 1.0


DOWNWARDS = (Stream.DOWN, Stream.BACK)
"""Streams that copy to host memory."""


class SimulatedDevice:
    """See ``swap.device.interface.ComputeDevice``, and above."""

    def __init__(self, seed: int | None = None, *, eager: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.errors: list[OrderError] = []
        self.num_copies = 0
        self._random = random.Random(f"{seed} device")
        self._chance = _AT_ONCE if eager else _NEVER
        if seed is not None:
            self._chance = self._random.choice(_CHANCES)
        self._queues = {stream: Queue() for stream in Stream}
        self._clocks: dict[Stream, Clock] = {stream: {} for stream in Stream}
        self._host: Clock = {}
        self._blocks: list[Any] = []
        self._storages: dict[int, Storage] = {}
        self._slabs: list[tuple[int, int]] = []
        self._dead: list[Range] = []
        self._turn = Turn()
        self._lock = threading.RLock()

    def check(self) -> None:
        """Raise the first error that there was."""
        with self._lock:
            self._look()
        if self.errors:
            raise self.errors[0]

    # Streams and events.

    def record(self, stream: Stream) -> SimulatedEvent:
        with self._acting():
            clock = self._clocks[stream]
            merge(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            here, turn = threading.get_ident(), self._turn.number
            position = self._queues[stream].num_given
            return SimulatedEvent(self, stream, position, clock.copy(), here, turn)

    def wait_for(self, stream: Stream, event: Any) -> None:
        with self._acting():
            self._check_own(event.device, "an event")
            is_here = event.thread == threading.get_ident()
            # Another thread hands a tensor over with the moment at which it was computed.
            is_known = event.turn == self._turn.number or not is_here
            if event.stream is Stream.COMPUTE and is_known:
                self._turn.ordered |= {stream}
            merge(self._clocks[stream], event.clock)
            if stream is Stream.COMPUTE:
                self._carry_out(event)
            else:
                self._give(stream, event)

    def is_done(self, event: SimulatedEvent) -> bool:
        with self._acting():
            stream = event.stream
            is_over = self._queues[stream].num_done >= event.position
            if stream is Stream.COMPUTE:  # which may be as far behind the host as it likes
                is_known = self._host.get(stream, 0) >= event.clock[stream]
                is_over = is_known or self._random.random() < self._chance
            if is_over:
                merge(self._host, event.clock)
            return is_over

    def wait(self, event: SimulatedEvent) -> None:
        with self._acting():
            self._carry_out(event)
            merge(self._host, event.clock)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with self._acting():
            self._carry_out(self.record(stream))
            merge(self._clocks[stream], self._host)
        yield

    # Copies.

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._acting(copies=True):
            self._check_pair(target, source)
            if not target.numel():
                return
            self.num_copies += 1
            into = self._end(target, is_host=stream in DOWNWARDS)
            out_of = self._end(source, is_host=stream is Stream.UP)
            for end in (into, out_of):
                self._check_computed(stream, end.region)
            clock = self._clocks[stream]
            merge(clock, self._host)
            out_of.region.access(stream, clock, out_of.reach, writes=False)
            into.region.access(stream, clock, into.reach, writes=True)
            clock[stream] = clock.get(stream, 0) + 1
            is_known = isinstance(out_of.region, Storage)
            expected = source.view(torch.uint8).clone() if is_known else None
            if not self._is_pending(into):
                target.view(torch.uint8).fill_(POISON)
            self._give(stream, Copy(into, out_of, expected))
            if stream is Stream.COMPUTE:
                self._carry_out(self.record(stream))

    def uses(self, stream: Stream, tensor: torch.Tensor, *, writes: bool = False) -> None:
        with self._acting():
            found = self._region_of(tensor)
            if found is None:
                return
            region, start = found
            clock = self._clocks[stream]
            merge(clock, self._host)
            region.access(stream, clock, (start, start + tensor.nbytes), writes=writes)
            clock[stream] = clock.get(stream, 0) + 1
            region.used_by.add(stream)

    # Memory.

    def memory(self, nbytes: int) -> Block:
        block = Block(self, nbytes)
        with self._acting():
            self._blocks.append(block)
        return block

    def tensor(
        self, memory: Block, offset: int, numel: int, dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        with self._acting():
            self._check_own(memory.device, "memory")
            if not nbytes:
                return torch.empty(0, dtype=dtype)
            place = Range(memory, offset, nbytes)
            self._take_over(place)
            if not self._is_pending(End(place, 0, nbytes)):
                place.bytes.fill_(POISON)
            memory.ranges.append(place)
            shown = Shown(memory, offset, nbytes, owner)
            finalizer(shown, self._dead, place)
            return shown.tensor(dtype)

    def register(self, slab: Slab) -> Callable[[], None]:
        place = slab.address, slab.address + slab.nbytes
        with self._acting():
            self._slabs.append(place)

        def undo() -> None:
            with self._acting():
                for stream in Stream:
                    event = self.record(stream)
                    self._carry_out(event)
                    merge(self._host, event.clock)
                self._slabs.remove(place)

        return undo

    # What each call begins with.

    @contextmanager
    def _acting(self, *, copies: bool = False) -> Iterator[None]:
        """One at a time. An error of order is kept, too."""
        with self._lock:
            turn = self._turn
            if not copies and turn.has_copied:
                turn.number, turn.ordered, turn.has_copied = turn.number + 1, frozenset(), False
            try:
                self._look()
                self._run_some()
                yield
            except OrderError as error:
                self.errors.append(error)
                raise

    def _look(self) -> None:
        """See what has been let go of."""
        dead, self._dead[:] = [*self._dead], []
        for place in dead:
            place.is_alive = False
            for stream in place.used_by:
                act = self._clocks[stream].get(stream, 0)
                # Not ordered among themselves: each is what the stream may still do.
                known = {one: count + 1 for one, count in self._all().items()} | {stream: act}
                place.access(stream, known, (0, place.nbytes), writes=True)
            if not self._is_pending(End(place, 0, place.nbytes)):
                place.bytes.fill_(POISON)
        for storage in [one for one in self._storages.values() if not one.is_alive]:
            del self._storages[storage.key]
            known = self._host.copy()
            if not storage.is_host:  # torch gives it to what computes next
                merge(known, self._clocks[Stream.COMPUTE])
            late = storage.unfinished(known)
            if late is not None:
                raise OrderError(
                    f"{storage.name} was let go of while {late.stream.value} may still "
                    f"{'write' if late.is_write else 'read'} it"
                )

    def _all(self) -> Clock:
        """As if everything that was given so far came before."""
        return {stream: clock.get(stream, 0) for stream, clock in self._clocks.items()}

    def _run_some(self) -> None:
        while self._random.random() < self._chance:
            ready = [stream for stream in Stream if self._can_go_on(stream)]
            if not ready:
                return
            self._do_next(self._random.choice(ready))

    def _can_go_on(self, stream: Stream) -> bool:
        items = self._queues[stream].items
        if not items:
            return False
        first = items[0]
        if isinstance(first, Copy):
            return True
        return self._queues[first.stream].num_done >= first.position

    # Carrying out.

    def _give(self, stream: Stream, item: Copy | SimulatedEvent) -> None:
        self._queues[stream].items.append(item)
        self._queues[stream].num_given += 1

    def _carry_out(self, event: SimulatedEvent) -> None:
        while self._queues[event.stream].num_done < event.position:
            self._do_next(event.stream)

    def _do_next(self, stream: Stream) -> None:
        queue = self._queues[stream]
        item = queue.items[0]
        if isinstance(item, SimulatedEvent):
            self._carry_out(item)
        queue.items.popleft()
        queue.num_done += 1
        if isinstance(item, Copy):
            self._do_copy(item)

    def _do_copy(self, copy: Copy) -> None:
        target, source = copy.target.bytes(), copy.source.bytes()
        for end, found in ((copy.target, target), (copy.source, source)):
            if found is None:
                raise OrderError(f"{end.region.name} was let go of before a copy was over")
        assert target is not None
        assert source is not None
        if copy.expected is not None and not torch.equal(source, copy.expected):
            self._tell_changed(copy)
        target.copy_(source)

    def _tell_changed(self, copy: Copy) -> None:
        """What is copied to memory that nobody uses any more matters to no one."""
        fault = f"{copy.source.region.name} was changed before the copy out of it was over"
        if not isinstance(copy.target.region, Range):
            raise OrderError(fault)
        copy.target.region.fault = fault

    def _is_pending(self, end: End) -> bool:
        copies = (i for q in self._queues.values() for i in q.items if isinstance(i, Copy))
        return any(end.touches(copy.target) or end.touches(copy.source) for copy in copies)

    # Whose memory it is.

    def _end(self, tensor: torch.Tensor, *, is_host: bool) -> End:
        found = self._region_of(tensor)
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        is_registered = any(start <= first and last <= stop for start, stop in self._slabs)
        if is_host and not is_registered:
            raise OrderError(f"{tensor.nbytes} bytes of host memory are in no registered slab")
        if not is_host and is_registered:
            raise OrderError(f"{tensor.nbytes} bytes that should be on the device are host memory")
        if found is None:
            storage = Storage(tensor, is_host=is_host)
            self._storages[storage.key] = storage
            found = storage, first - storage.start
        region, start = found
        return End(region, start, start + tensor.nbytes)

    def _region_of(self, tensor: torch.Tensor) -> tuple[Range | Storage, int] | None:
        """With the byte of it that ``tensor`` begins at."""
        for block in self._blocks:
            if block.holds(tensor):
                at = tensor.data_ptr() - block.address
                for place in reversed(block.ranges):
                    if place.offset <= at < place.offset + place.nbytes:
                        return place, at - place.offset
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None or not storage.is_alive:
            return None
        return storage, tensor.data_ptr() - storage.start

    def _take_over(self, place: Range) -> None:
        """What was done to ranges that were there before has to come first."""
        stop = place.offset + place.nbytes
        others, before = place.block.ranges, Clock()
        for other in others:
            start, end = other.offset, other.offset + other.nbytes
            if start >= stop or place.offset >= end:
                continue
            if other.is_alive:
                raise OrderError(f"{other.name} is handed out while it is in use")
            merge(before, other.last_acts())
        place.begin_after(before)
        place.block.ranges = [
            other
            for other in others
            if other.offset < place.offset or other.offset + other.nbytes > stop
        ]

    # What is refused.

    def _check_own(self, device: object, what: str) -> None:
        if device is not self:
            raise OrderError(f"{what} is of another device")

    def _check_pair(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for tensor in (target, source):
            if not tensor.is_contiguous() or tensor.dim() != 1:
                raise OrderError(f"a tensor of shape {tuple(tensor.shape)} is not flat")
        if (target.dtype, target.numel()) != (source.dtype, source.numel()):
            raise OrderError(f"{source.dtype} of {source.numel()} is copied to another kind")

    def _check_computed(self, stream: Stream, region: Region) -> None:
        """Memory of torch was made by what the program computed: whoever copies it, or to it, waits
        for an event of this thread that was recorded since it last copied other such memory, or for
        one that was recorded on another thread.
        """
        if stream is Stream.COMPUTE or not isinstance(region, Storage) or region.is_host:
            return
        turn = self._turn
        if stream not in turn.ordered and turn.last is not region:
            raise OrderError(
                f"{stream.value} copies {region.name} and does not wait for what was computed"
            )
        turn.has_copied, turn.last = True, region
