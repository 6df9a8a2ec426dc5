"""Whole weights of parameters that are partitioned over ranks: gathered when they are used, kept
while that is worth it.

It stands before the ``WeightCache`` of this rank's slices and has the same methods. Gathering is
collective, so what is gathered when must not depend on anything that differs between ranks: it
follows from the order of uses alone, never from what has arrived already or which memory is free.
Memory that somebody still holds is waited for.

A use fetches the slice (which was read along the schedule), meets the other ranks, and starts the
transfer; then the same is done for the parameter that comes next by the recorded order, so that its
slices travel while this one is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from aio import Slab, SlabFullError
from infinity.parameters.records import Record
from infinity.ranks.collectives import GATHER, Ranks, Transfer
from swap.cache.owners import Held, Owners
from swap.cache.patience import Patience
from swap.cache.weight_cache import WeightCache
from swap.memory.uses import other_uses, storage_at
from swap.plan import eviction
from swap.plan.schedule import Schedule
from swap.storage.components import as_tensor
from swap.tiers import BudgetError, format_bytes
from swap.timeline import Timeline

_RELEASE_SECONDS = 2.0
"""How long a gather waits for memory that autograd or the program is about to drop."""


class Weights(Protocol):
    """What computing needs of weights, see ``swap.cache.weight_cache.WeightCache``."""

    def acquire(self, parameters: Iterable[int], holder: Hashable) -> list[torch.Tensor]: ...

    def release(self, holder: Hashable) -> None: ...

    def borrow(self, parameter: int) -> torch.Tensor: ...

    def owner(self, storage: int) -> int | None: ...

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]: ...

    def renew(self, parameter: int, weight: torch.Tensor) -> None: ...

    def at_home(self, parameter: int) -> torch.Tensor | None: ...

    def drop(self) -> None: ...


class GatherMemory:
    """Memory for what is gathered and exchanged: ranges of a slab, which come back when the last
    tensor over them is gone; on a GPU torch's own.

    Which ranges are free may differ between ranks, by what programs and garbage collectors still
    hold. So ranks take memory together: all of them get it or none does.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self._slab = Slab(nbytes) if device.type == "cpu" else None
        self.make_room: list[Callable[[], None]] = []
        """Called, on all ranks, when memory is short on one of them; each gives some back."""

    def take(
        self, numel: int, dtype: torch.dtype, meet: Callable[[int], list[list[int]]]
    ) -> torch.Tensor | None:
        """A flat tensor on every rank, or None on every rank, where ranks meet about it (see
        ``Ranks.meet``; what is given is the digest).
        """
        found = self._new(numel, dtype, wait=False)
        if not any(row[3] for row in meet(found is None)):
            return found
        for give_back in self.make_room:
            give_back()
        if found is None:
            found = self._new(numel, dtype, wait=True)
        return None if any(row[3] for row in meet(found is None)) else found

    def error(self, nbytes: int, what: str) -> BudgetError:
        """What to raise when ``take`` found nothing."""
        return BudgetError(
            f"no room for {what} ({format_bytes(nbytes)}) on one of the ranks: the "
            f"{format_bytes(self.nbytes)} for gathered weights and gradients are held by modules "
            "and operations at work, by autograd (a checkpointed block keeps its weights until its "
            "backward is over) or by the program; give more host_memory, or checkpoint smaller "
            "blocks"
        )

    def _new(self, numel: int, dtype: torch.dtype, *, wait: bool) -> torch.Tensor | None:
        if self._slab is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        patience = Patience(_RELEASE_SECONDS)
        while True:
            try:
                # The last resort, or it would depend on the rank what lies where.
                return as_tensor(self._slab.allocate(numel * dtype.itemsize, apart=wait), dtype)
            except SlabFullError:
                if not wait or not patience.waits(self._slab.wait_for_release):
                    return None

    @property
    def peak_host_bytes(self) -> int:
        """The most host memory that was in use at once."""
        return 0 if self._slab is None else self._slab.peak_bytes

    def close(self) -> None:
        """No more is given out; what is held stays."""
        if self._slab is not None:
            self._slab.close()


@dataclass(slots=True, eq=False)
class _Entry:
    """Whole weights, flat, or on their way."""

    weight: torch.Tensor
    transfer: Transfer
    nbytes: int
    was_lent: bool = False
    """Whether anybody got them: none before they are there."""


class GatheredWeights:
    """The whole weights of partitioned parameters, and those of the others as they are here.

    ``capacity_bytes`` of whole weights are kept at most, the same number on every rank.
    """

    def __init__(
        self,
        records: Sequence[Record],
        slices: WeightCache,
        ranks: Ranks,
        memory: GatherMemory,
        *,
        capacity_bytes: int,
        timeline: Timeline,
        prefetch: bool = True,
    ) -> None:
        self._records = records
        self._slices = slices
        self._ranks = ranks
        self._memory = memory
        self._capacity = capacity_bytes
        self._timeline = timeline
        self._prefetch = prefetch
        self._schedule = Schedule()
        self._policy = eviction.for_weights(self._schedule)
        self._entries: dict[int, _Entry] = {}
        self._owners = Owners()
        self._pins: dict[Hashable, tuple[int, ...]] = {}
        self.gathered_bytes = 0
        memory.make_room.append(self._forget_idle)

    def acquire(self, parameters: Iterable[int], holder: Hashable) -> list[torch.Tensor]:
        """As ``borrow``, kept until ``holder`` releases them. Raises as that; then none is kept."""
        wanted = tuple(parameters)
        self._pins[holder] = wanted
        kept = [index for index in wanted if not self._records[index].is_partitioned]
        try:
            whole = dict(zip(kept, self._slices.acquire(kept, holder), strict=True))
            return [whole[i] if i in whole else self._borrow(i) for i in wanted]
        except BaseException:
            self.release(holder)
            raise

    def release(self, holder: Hashable) -> None:
        """Undo what ``holder`` acquired. Idempotent."""
        self._slices.release(holder)
        self._pins.pop(holder, None)

    def borrow(self, parameter: int) -> torch.Tensor:
        """The current weights, flat and whole; valid for as long as the caller refers to them.

        Raises ``RankFailedError``, and what ``WeightCache.borrow`` raises.
        """
        if not self._records[parameter].is_partitioned:
            return self._slices.borrow(parameter)
        return self._borrow(parameter)

    def owner(self, storage: int) -> int | None:
        """The parameter whose weights, gathered or in the arena, have the storage ``_cdata``; also
        when they are kept no more and still held.
        """
        found = self._owners.of(storage)
        return self._slices.owner(storage) if found is None else found

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        """Current or ``outdated`` weights of these, gathered or in the arena, that autograd or the
        program refers to.
        """
        whole = {index for index in parameters if not self._records[index].is_partitioned}
        gathered = self._owners.held(parameters - whole, outdated=outdated)
        held = [one for one in gathered if not self._is_ours_alone(one)]
        return held + self._slices.held(whole, outdated=outdated)

    def _is_ours_alone(self, held: Held) -> bool:
        entry = self._entries.get(held.parameter)
        if entry is None or storage_at(entry.weight) != held.storage:
            return False
        return not entry.was_lent or not other_uses(entry.weight)

    def renew(self, parameter: int, weight: torch.Tensor) -> None:
        """Flat ``weight``, a copy of the current ones, is in their place from now on."""
        if not self._records[parameter].is_partitioned:
            self._slices.renew(parameter, weight)
            return
        self._owners.note(weight, parameter)
        if parameter in self._entries:
            self._entries[parameter].weight = weight

    def at_home(self, parameter: int) -> torch.Tensor | None:
        """The weights, flat, if they are whole on this rank and computed with where they live."""
        if self._records[parameter].is_partitioned:
            return None
        return self._slices.at_home(parameter)

    def drop(self) -> None:
        """Forget everything cached, because values at home were changed."""
        for index in list(self._entries):
            self._forget(index)
        self._owners.clear()
        self._slices.drop()

    def end_step(self, updated: Iterable[int]) -> None:
        """A step was taken: what is cached of the ``updated`` parameters is out of date."""
        self._schedule.end_cycle()
        outdated = list(updated)
        self._owners.outdate(outdated)
        for index in outdated:
            self._forget(index)

    def _idle(self) -> list[int]:
        """What is gathered and held by none, in the same order on every rank."""
        pinned = {index for held in tuple(self._pins.values()) for index in held}
        return sorted((index for index in self._entries if index not in pinned), reverse=True)

    def _borrow(self, parameter: int) -> torch.Tensor:
        self._schedule.record(parameter)
        self._policy.used(parameter)
        entry = self._entries.get(parameter)
        if entry is None:
            has_room = self._make_room(self._nbytes(parameter))
            entry = self._start(parameter) if has_room else None
        if entry is None:
            raise self._memory.error(self._nbytes(parameter), self._records[parameter].name)
        with self._timeline.span("stall", label=self._records[parameter].name):
            entry.transfer.wait()
        entry.was_lent = True
        if self._prefetch:
            self._start_next()
        return entry.weight

    def _start_next(self) -> None:
        """Start gathering what is expected next, if there is room that is not needed sooner."""
        if self._schedule.is_at_start:
            return  # what comes next is after a step, and has other values then
        for parameter in self._schedule.upcoming():
            if parameter not in self._entries and self._make_room(
                self._nbytes(parameter), ahead_for=parameter
            ):
                self._start(parameter)
            return

    def _start(self, parameter: int) -> _Entry | None:
        """None where there is no memory for it on some rank."""
        record = self._records[parameter]
        for entry in self._entries.values():  # one that nobody wants still holds its slice
            entry.transfer.wait()
        part = self._slices.borrow(parameter)

        def start() -> _Entry | None:
            weight = self._memory.take(
                record.numel, record.spec.dtype, partial(self._ranks.meet, GATHER, parameter)
            )
            if weight is None:
                return None
            transfer = self._ranks.gather(part, weight, record.cut.offsets)
            entry = _Entry(weight, transfer, self._nbytes(parameter))
            self._entries[parameter] = entry
            self._owners.note(weight, parameter)
            self._policy.added(parameter)
            self.gathered_bytes += entry.nbytes
            return entry

        return self._ranks.undivided(start)

    def _nbytes(self, parameter: int) -> int:
        return self._records[parameter].weight_bytes

    def _make_room(self, nbytes: int, *, ahead_for: int | None = None) -> bool:
        """Forget what the policy names, until ``nbytes`` fit."""
        while sum(entry.nbytes for entry in self._entries.values()) + nbytes > self._capacity:
            victim = self._policy.victim(self._idle(), ahead_for=ahead_for)
            if victim is None:
                return False
            self._forget(victim)
        return True

    def _forget_idle(self) -> None:
        for index in self._idle():
            self._forget(index)

    def _forget(self, parameter: int) -> None:
        entry = self._entries.pop(parameter, None)
        if entry is None:
            return
        entry.transfer.wait()
