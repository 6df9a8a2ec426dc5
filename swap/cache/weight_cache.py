"""Weights for computing: fetched when needed or before, kept while that is worth it, evicted.

An entry of the arena is *reading* (operations in flight), *refreshing* (an update delivers its
parts) or *ready*. When a step is taken, the ready entries of the updated parameters turn *stale*:
they are not computed with again, but the update takes the old weights from them instead of from the
SSD.

The policy of ``swap.plan.eviction`` is told of uses, and says who is evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Set

import torch

from aio import AioError
from aio.errors import let_go
from aio.process.threads import LOOK_SECONDS, Changes, Latch
from swap.cache.arena import Arena, Entry, Transfer
from swap.cache.eviction import CacheEntries, wait_for
from swap.cache.owners import Held
from swap.cache.pace import Pace
from swap.cache.patience import Patience, Workers
from swap.cache.reads import WeightReads
from swap.plan import eviction
from swap.plan.layout import Segment, Subgroup
from swap.plan.schedule import Schedule
from swap.storage.components import ComponentStore
from swap.timeline import Timeline

_RELEASE_SECONDS = 2.0
"""A fetch waits so long for memory to be dropped; ten times that beside an update or a thread."""


class WeightCache:
    """The resident weights. All methods are thread-safe."""

    def __init__(
        self,
        components: ComponentStore,
        arena: Arena | None,
        timeline: Timeline,
        *,
        prefetch: bool = True,
    ) -> None:
        self.schedule = Schedule()
        self.hits = self.misses = 0
        self._specs = components.layout.specs
        self._components = components
        self.arena = arena
        self._reads = None if arena is None else WeightReads(components, arena, timeline)
        self._timeline = timeline
        self._prefetch = prefetch
        if arena is not None:
            self._pace = Pace(arena)
        self._policy = eviction.for_weights(self.schedule)
        self._cached = CacheEntries(self._specs, arena, self._policy)
        self._entries = self._cached.entries
        self._stale = self._cached.stale
        self._pins = self._cached.pins
        self._workers = Workers()
        self._pending: dict[int, set[int]] = {}
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._changes = Changes()

    # What a forward or a backward pass does.

    def acquire(self, parameters: Iterable[int], holder: Hashable) -> list[torch.Tensor]:
        """The weights of ``parameters`` as flat tensors, kept resident until ``holder``, which has
        acquired nothing yet, releases them.

        Raises ``AioError`` when they cannot be read and ``BudgetError`` when the arena cannot hold
        them at once; then none of them is kept. After an interrupt the holder may have them or not;
        ``release`` is right in either case.
        """
        wanted = tuple(parameters)
        with self._lock:
            self._pins[holder] = wanted
            self._workers.add(holder)
        try:
            for parameter in wanted[1:]:
                self._start_early(parameter)
            return [self.borrow(parameter) for parameter in wanted]
        except BaseException as failure:
            let_go(failure)
            self.release(holder)
            raise

    def owner(self, storage: int) -> int | None:
        """Whose weights have the storage of that ``_cdata``, be they evicted and held still."""
        return self._cached.owners.of(storage)

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        """See ``CacheEntries.held``; of those in the arena."""
        with self._lock:
            return self._cached.held(parameters, outdated=outdated)

    def renew(self, parameter: int, weight: torch.Tensor) -> None:
        """Flat ``weight``, a copy of the current ones, is in their place from now on."""
        with self._lock:
            self._cached.renew(parameter, weight)

    def release(self, holder: Hashable) -> None:
        """Undo what ``holder`` acquired. Idempotent."""
        with self._lock:
            self._pins.pop(holder, None)
            self._workers.discard(holder)

    def borrow(self, parameter: int) -> torch.Tensor:
        """The current weights of ``parameter``, flat; valid while the caller refers to them."""
        self._components.mixture.check()
        with self._lock:
            self.schedule.record(parameter)
            self._policy.used(parameter)
        weight = self.at_home(parameter)
        if weight is not None:
            self.wait_until_updated(parameter)
            self._components.arrays.before_compute(parameter)
        else:
            weight = self._fetch(parameter)
        if self._prefetch:
            self._prefetch_ahead(self._specs[parameter].weight_bytes)
        return weight

    def end_cycle(self) -> None:
        """A pass of inference is over: what comes now is expected to be another."""
        with self._lock:
            self.schedule.end_cycle()

    # What the update does.

    def begin_update(
        self, parts: Mapping[int, tuple[int, ...]], updated: Collection[int], taken: frozenset[int]
    ) -> None:
        """These subgroups are about to move; what is cached of the ``updated`` parameters is out of
        date. Of subgroups that are ``taken`` the update has the old weights.

        A parameter that shares a subgroup with an updated one moves with it: no read of its old
        extents may be in flight, or start, until it is published.
        """
        with self._lock:
            self._failure = None
            self._cached.owners.outdate(p for p in parts if p in updated)
            for parameter, subgroups in parts.items():
                self._pending[parameter] = set(subgroups)
                if parameter in updated:
                    is_at_home = self._components.arrays.weight(parameter, on_host=True) is not None
                    is_read = not (is_at_home or taken.issuperset(subgroups))
                    self._cached.outdate(parameter, is_read=is_read)
                elif parameter in self._entries:
                    wait_for(self._entries[parameter])
            # What comes in the place of one waits for all that is computed until it goes: now.
            if self.arena is not None:
                self.arena.note_released()

    def take_old(self, segment: Segment, out: torch.Tensor, coming: list[Transfer]) -> bool:
        """Copy the old weights of ``segment`` into ``out`` if the arena has them. A copy that is
        still under way on return is added to ``coming``.
        """
        with self._workers.working():
            return self._take_old(segment, out, coming)

    def _take_old(self, segment: Segment, out: torch.Tensor, coming: list[Transfer]) -> bool:
        parameter = segment.parameter
        with self._lock:
            entry = self._stale.get(parameter)
            if entry is None and parameter not in self._pending:
                entry = self._entries.get(parameter)
        if entry is None or entry.missing or not wait_for(entry):
            return False
        with self._lock:
            self._cached.arrive(entry)
        copy = self._cached.arena.read_back(entry, segment.start, out)
        if copy is not None:
            coming.append(copy)
        if segment.start + segment.length == entry.spec.numel:
            with self._lock:
                self._stale.pop(parameter, None)
        return True

    def insert(self, segment: Segment, weight: torch.Tensor) -> Transfer | None:
        """New weights of ``segment``: keep a copy if there is room that is not needed sooner.

        ``weight`` stays until what is returned is done; None if nothing is copied any more.
        """
        if self.at_home(segment.parameter) is not None:
            return None
        with self._workers.working():
            return self._insert(segment, weight)

    def _insert(self, segment: Segment, weight: torch.Tensor) -> Transfer | None:
        with self._lock:
            entry = self._entries.get(segment.parameter)
            if entry is None and segment.start == 0:
                entry = self._open_for_refresh(segment.parameter)
        if entry is None or segment.subgroup not in entry.missing:
            return None
        copy = self._cached.arena.put(entry, segment.start, weight)
        with self._lock:
            entry.missing.discard(segment.subgroup)
            self._changes.tell()
        return copy

    def end_reads(self, group: Subgroup) -> None:
        """Wait for reads, begun by another thread, of what is about to go."""
        for segment in group.segments:
            if (entry := self._stale.get(segment.parameter)) is not None:
                wait_for(entry)

    def published(self, parameter: int, subgroup: int) -> None:
        """The new values of ``parameter`` in ``subgroup`` are at home."""
        with self._lock:
            if (pending := self._pending.get(parameter)) is None:
                return
            pending.discard(subgroup)
            if not pending:
                del self._pending[parameter]
                self._stale.pop(parameter, None)
                entry = self._entries.get(parameter)
                if entry is not None and entry.missing:
                    del self._entries[parameter]  # a part was not inserted, and never will be
            self._changes.tell()

    def fail(self, failure: BaseException | None) -> None:
        """The update stopped, for now if ``failure`` is None: forget what is not home; wake all."""
        with self._lock:
            self._failure = failure
            for parameter in self._pending:
                self._cached.forget(parameter)
            self._changes.tell()

    def forget_update(self) -> None:
        """The update that was stopped never will be finished; nobody waits for it."""
        self._pending.clear()
        self.fail(None)

    def drop(self) -> None:
        """Forget everything cached: values at home change, behind all that is computed by now."""
        with self._lock:
            self._cached.clear()
        if self.arena is not None:
            self.arena.wait_for_copies_from(None)

    # How weights are found.

    def at_home(self, parameter: int) -> torch.Tensor | None:
        """The weights of ``parameter``, flat, if they are computed with where they live."""
        on_host = self.arena is None or self.arena.uses_home
        return self._components.arrays.weight(parameter, on_host=on_host)

    def wait_until_updated(self, parameter: int) -> None:
        """Wait until no update of ``parameter`` is under way; raises the failure of one that
        stopped.
        """
        if parameter in self._pending:
            with self._timeline.span("stall", label=self._specs[parameter].name):
                while (change := self._change_unless_updated(parameter)) is not None:
                    change.wait(LOOK_SECONDS)

    def _change_unless_updated(self, parameter: int) -> Latch | None:
        with self._lock:
            if parameter not in self._pending:
                return None
            self._check_failure()
            return self._changes.next()

    def _fetch(self, parameter: int) -> torch.Tensor:
        weight = self._arrived(parameter)
        if weight is None:
            with self._timeline.span("stall", label=self._specs[parameter].name):
                weight = self._ready(self._read(parameter))
        return weight

    def _arrived(self, parameter: int) -> torch.Tensor | None:
        with self._lock:
            entry = self._entries.get(parameter)
            if entry is None or entry.missing or entry.is_reading:
                return None
            self.hits += 1
        return self._ready(entry)

    def _ready(self, entry: Entry) -> torch.Tensor:
        return self._cached.arena.ready(entry).view(-1)  # what is held is told by it

    def _read(self, parameter: int) -> Entry:
        """What failed when it was read ahead is read again: it was nobody's error then, and the
        SSD may be well by now.
        """
        while True:
            entry = self._find_or_read(parameter)
            try:
                self._finish_reading(entry)
                return entry
            except AioError:
                if not entry.is_ahead:
                    raise
            del entry  # what it was read into may be all the room that there is

    def _find_or_read(self, parameter: int) -> Entry:
        """The entry of ``parameter``, be it reading. Waits without the lock, which others need."""
        patience = Patience(_RELEASE_SECONDS)
        with self._workers.waiting():
            while (entry := self._find_or_start(parameter)) is None:
                # When another thread has computed with weights, nothing tells that they may go.
                is_at_work = bool(self._pending) or self._workers.is_another_at_work
                if not patience.waits(self._cached.arena.wait_for_release, is_at_work=is_at_work):
                    at_home = {i for i in range(len(self._specs)) if self.at_home(i) is not None}
                    raise self._cached.too_small(parameter, at_home)
        return entry

    def _find_or_start(self, parameter: int) -> Entry | None:
        """None if there is no room; waits for an update that is under way."""
        while True:
            with self._lock:
                entry = self._entries.get(parameter)
                if entry is not None and not entry.missing:
                    self.hits += 1
                    return entry
                if parameter not in self._pending:
                    entry = self._start_read(parameter, ahead=False)
                    self.misses += entry is not None
                    if entry is None:
                        self._cached.send_on(wait=True)  # what has landed keeps others from landing
                    return entry
                self._check_failure()
                change = self._changes.next()
            change.wait(LOOK_SECONDS)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise let_go(self._failure)

    def _finish_reading(self, entry: Entry) -> None:
        """Wait for the reads of ``entry``; a failed read is raised, and the entry is forgotten."""
        try:
            for operation in entry.operations:
                operation.result()
        except BaseException:
            wait_for(entry)  # or the rest would keep its memory
            with self._lock:
                if self._entries.get(entry.spec.index) is entry:
                    del self._entries[entry.spec.index]
            raise
        with self._lock:
            self._cached.arrive(entry)

    # How they get into the arena.

    def _start_early(self, parameter: int) -> None:
        """Start what a module asks for next, so that its parameters are read together."""
        with self._lock:
            if self._is_absent(parameter):
                self._start_read(parameter, ahead=True)

    def _prefetch_ahead(self, used_bytes: int) -> None:
        """Start reads along the schedule for as long as there is room that is not needed sooner."""
        if self.arena is None or self._reads is None or not self.schedule.plan:
            return
        ahead_bytes = 0
        with self._lock:
            self._cached.send_on()
            if not self._pace.is_time(used_bytes):
                return
            for parameter in self.schedule.upcoming():
                if self.at_home(parameter) is not None:
                    continue  # it takes no room here
                ahead_bytes += self._specs[parameter].weight_bytes
                if ahead_bytes > self.arena.nbytes:
                    return
                is_absent = self._is_absent(parameter)
                if is_absent and self._start_read(parameter, ahead=True) is None:
                    if self._reads.need_landing(parameter):
                        self._pace.ended_at(self._specs[parameter])
                    return

    def _is_absent(self, parameter: int) -> bool:
        return (
            parameter not in self._entries
            and parameter not in self._pending
            and self.at_home(parameter) is None
        )

    def _open_for_refresh(self, parameter: int) -> Entry | None:
        parts = set(self._components.layout.subgroups_of(parameter))
        is_whole = self._pending.get(parameter) == parts
        return self._cached.open_for_refresh(parameter, parts) if is_whole else None

    def _start_read(self, parameter: int, *, ahead: bool) -> Entry | None:
        """Start reading into a new entry, now or ``ahead`` of its use; None if there is no room."""
        assert self._reads is not None
        landing = self._reads.need_landing(parameter)
        if (entry := self._cached.make_room(parameter, ahead=ahead, landing=landing)) is None:
            return None
        entry.is_ahead = ahead
        self._reads.start(entry)
        self._entries[parameter] = entry
        return entry
