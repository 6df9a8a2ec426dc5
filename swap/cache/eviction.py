"""Who is in the arena: the entries, their way to the device, and making room for new ones.

Who leaves is for the policy to say (``swap.plan.eviction``). Not thread-safe: the cache over it
serialises.
"""

from __future__ import annotations

from collections.abc import Hashable, Set

import torch

from aio import AioError, Operation, SlabFullError
from swap.cache.arena import Arena, Entry
from swap.cache.owners import Held, Owners
from swap.memory.uses import other_uses, storage_at
from swap.plan.eviction import Policy
from swap.plan.layout import ParameterSpec
from swap.tiers import BudgetError, format_bytes


class CacheEntries:
    """``entries``: current weights, or on their way. ``stale``: weights from before a step, which
    only its update still reads. ``pins``: what each of those who compute holds; no counts, which an
    interrupt could leave wrong.
    """

    def __init__(
        self, specs: tuple[ParameterSpec, ...], arena: Arena | None, policy: Policy
    ) -> None:
        self.entries: dict[int, Entry] = {}
        self.stale: dict[int, Entry] = {}
        self.pins: dict[Hashable, tuple[int, ...]] = {}
        self._specs = specs
        self._arena = arena
        self._policy = policy
        self.owners = Owners()

    @property
    def arena(self) -> Arena:
        """Where not all weights are computed with at home."""
        assert self._arena is not None
        return self._arena

    @property
    def pinned(self) -> set[int]:
        """Parameters that are held, by whomever."""
        return {parameter for held in self.pins.values() for parameter in held}

    def outdate(self, parameter: int, *, is_read: bool) -> None:
        """A step is taken. ``is_read``: its update reads the weights from before. What is on its
        way stays known, too: until it has come, what it is read from may not go.
        """
        entry = self.entries.pop(parameter, None)
        if entry is not None and not entry.missing and (is_read or entry.is_reading):
            self.stale[parameter] = entry

    def forget(self, parameter: int) -> None:
        """The step that it was outdated for has stopped."""
        self.entries.pop(parameter, None)
        entry = self.stale.pop(parameter, None)
        if entry is not None:
            wait_for(entry)

    def clear(self) -> None:
        """Forget everybody: values at home change."""
        for entry in (*self.entries.values(), *self.stale.values()):
            wait_for(entry)
        self.entries.clear()
        self.stale.clear()
        self.owners.clear()

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        """Current or ``outdated`` weights of these that autograd or the program refers to, wherever
        they are.
        """
        held = self.owners.held(parameters, outdated=outdated)
        return [one for one in held if not self._is_ours_alone(one)]

    def _is_ours_alone(self, held: Held) -> bool:
        return any(
            entry is not None
            and storage_at(entry.weight) == held.storage
            and not is_held_elsewhere(entry)
            for entry in (self.entries.get(held.parameter), self.stale.get(held.parameter))
        )

    def open_for_refresh(self, parameter: int, parts: set[int]) -> Entry | None:
        """A new entry that the update fills, if there is room: every one of its ``parts`` is still
        to come.
        """
        entry = self.make_room(parameter, ahead=True, landing=False)
        if entry is not None:
            entry.missing = parts
            self.entries[parameter] = entry
        return entry

    def renew(self, parameter: int, weight: torch.Tensor) -> None:
        """Who holds weights from before a step gave them the current values: they are the entry
        now, if there is one, and the memory that it had comes back.
        """
        self.owners.note(weight, parameter)
        entry = self.entries.get(parameter)
        if entry is not None and not entry.missing and not entry.is_reading:
            entry.weight, entry.landing = weight, None

    def make_room(self, parameter: int, *, ahead: bool, landing: bool) -> Entry | None:
        """A new entry, evicting for what is needed now whatever is not pinned, for what is wanted
        ``ahead`` of its use only what is worth less. None if that does not make room enough; for
        what is needed now there is enough if so many bytes are free. Nothing is evicted for what
        has no room to land.
        """
        if landing and not self.arena.can_land(self._specs[parameter]):
            return None
        while (entry := self._new(parameter, landing)) is None:
            if not self._evict_one(parameter if ahead else None):
                entry = None if ahead else self._new(parameter, landing, apart=True)
                break
        if entry is not None:
            self.owners.note(entry.weight, parameter)
            self._policy.added(parameter)
        return entry

    def _new(self, parameter: int, landing: bool, *, apart: bool = False) -> Entry | None:
        try:
            return self.arena.new(self._specs[parameter], landing=landing, apart=apart)
        except SlabFullError:
            return None

    def arrive(self, entry: Entry) -> None:
        """All its reads are finished."""
        if entry.is_reading:
            self.arena.arrived(entry)
            entry.operations = []  # last: an interrupt before this has it done again

    def send_on(self, *, wait: bool = False) -> None:
        """Let entries whose reads are finished go on to the device, if there is one; with ``wait``
        those that are being read, too.
        """
        if self.arena.uses_home:
            return
        for parameter, entry in list(self.entries.items()):
            if not entry.is_reading or not (wait or entry.finished_reading()):
                continue
            if wait_for(entry):
                self.arrive(entry)
            elif wait:  # asking for what could not be read reads it again, or raises the error
                del self.entries[parameter]

    def too_small(self, parameter: int, at_home: Set[int]) -> BudgetError:
        """The error of weights that there is no room for, whatever else leaves; those ``at_home``
        are computed with where they live.
        """
        spec = self._specs[parameter]
        held = sum(self._specs[pinned].weight_bytes for pinned in self.pinned - at_home)
        memory = "host_memory" if self.arena.uses_home else "device_memory"
        what = f"no room for {spec.name} ({format_bytes(spec.weight_bytes)}): "
        if held > self.arena.nbytes:
            return BudgetError(
                f"{what}{format_bytes(held)} of weights are needed at once, by one operation over "
                "weights of several modules (torch.cat of them, say) or by forward passes of "
                f"several threads, and there is room for {format_bytes(self.arena.nbytes)}; give "
                f"at least {format_bytes(held - self.arena.nbytes)} more {memory}, or use "
                "these weights one after another"
            )
        return BudgetError(
            f"{what}all {format_bytes(self.arena.nbytes)} for weights are taken, "
            f"{format_bytes(held)} by modules and operations at work, the rest by tensors that "
            "autograd or the program still holds (views, as parameters_to_vector takes; a "
            "checkpointed block keeps its weights until its backward is over, and what hooks save, "
            "as those of selective checkpointing and torch.autograd.graph.save_on_cpu, stays until "
            f"the graph is gone); give more {memory}, checkpoint smaller blocks, use activations= "
            "in place of such hooks, or use weights one after another"
        )

    def _evict_one(self, ahead_for: int | None) -> bool:
        """Drop the entry that the policy names, of those whose memory comes back then."""
        entries = self._may_leave(can_wait=ahead_for is not None)
        while (index := self._policy.victim(entries, ahead_for=ahead_for)) is not None:
            if not is_held_elsewhere(entries[index]):
                break
            del entries[index]
        if index is None:
            return False
        victim = entries[index]
        wait_for(victim)  # known until then: what it is read from may not go
        for among in (self.entries, self.stale):
            if among.get(index) is victim:  # a signal handler may have had it go
                del among[index]
        return True

    def _may_leave(self, *, can_wait: bool) -> dict[int, Entry]:
        """By parameter; of one with current and stale weights the current ones first. For what can
        wait entries on their way stay.
        """
        pinned = self.pinned
        found: dict[int, Entry] = {}
        for index, entry in (*self.entries.items(), *self.stale.items()):
            is_held = index in pinned and self.stale.get(index) is not entry
            if is_held or (can_wait and (entry.missing or not entry.finished_reading())):
                continue
            found.setdefault(index, entry)
        return found


def is_held_elsewhere(entry: Entry) -> bool:
    """Whether autograd or the program refers to the memory of an entry. Dropping it gives nothing
    back then, and another use would read the same weights beside it.
    """
    if entry.is_reading or entry.missing:
        return False  # nobody got it yet
    landing, storage = entry.landing, entry.weight.untyped_storage()
    shares = landing is not None and landing.untyped_storage()._cdata == storage._cdata
    return other_uses(entry.weight) > shares


def wait_for(entry: Entry) -> bool:
    """Wait for all reads of an entry that nobody will compute with; False if one failed.

    Such a failure is not raised here: whoever needs these weights reads them again, and is told
    then.
    """
    ended_well = [_ended_well(operation) for operation in entry.operations]
    return all(ended_well)


def _ended_well(operation: Operation) -> bool:
    try:
        operation.result()
    except AioError:
        return False
    return True
