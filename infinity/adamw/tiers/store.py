"""Optimizer state of parameters that are the program's, in host memory and on NVMe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from infinity.adamw.tiers.loads import NUM_SLOTS, link_sizes
from infinity.adamw.tiers.sweep import Expect, StateGroup, Sweeps, Work
from swap.device.link import Link
from swap.device.opening import open_device, register_all
from swap.interruptions.undo import Undo
from swap.memory.passage import Passage
from swap.memory.slabs import slab_of, slab_sizes, slots_of
from swap.plan.layout import ParameterSpec
from swap.plan.placement import Placement
from swap.plan.rules import UpdateRule
from swap.plan.sizes import MIN_CHECKPOINT_BYTES
from swap.plan.state_placement import Taken, place_state
from swap.storage.components import ComponentStore
from swap.storage.drives.bandwidth import shares
from swap.storage.extents import ExtentStore
from swap.storage.opening import open_extents
from swap.tiers import Budget, BudgetError
from swap.timeline import Timeline
from swap.update.staging import Staged, Staging


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a parameter is: as number ``index`` of ``components``, in subgroups of the store."""

    components: ComponentStore
    index: int
    groups: tuple[int, ...]


class StateStore:
    """The components that a rule keeps beside weights, for parameters known by number.

    ``directories`` share the load by their bandwidth, as far as that was measured and kept.
    One thread at a time, but for ``read`` and ``write``.
    """

    def __init__(self, rule: UpdateRule, directories: Sequence[str], host_bytes: int) -> None:
        self.timeline = Timeline()
        self.budget_bytes = host_bytes
        self.checkpoint_bytes = MIN_CHECKPOINT_BYTES
        self.nvme_bytes = 0
        """What is reserved on the SSDs, new versions of what is written included."""
        self.extents: ExtentStore | None = None
        """Where state is on the SSDs; None while all of it is at home in host memory."""
        self.links: dict[torch.device, Link] = {}
        """To the devices that parameters are on, where these have memory of their own."""
        self._rule = rule
        self._directories = directories
        self._taken = Taken()
        self._groups: list[StateGroup] = []
        self._rooms: list[_Room] = []
        self._sweeps = Sweeps(self.timeline)
        self._passage: Passage | None = None
        self._undo = Undo()

    @property
    def host_bytes(self) -> int:
        """Host memory that is given out, to callers and for saves too."""
        return self._taken.host_bytes + self.checkpoint_bytes

    @property
    def num_parameters(self) -> int:
        """How many have room; the next one gets this number."""
        return len(self._rooms)

    def add(
        self,
        specs: Sequence[ParameterSpec],
        *,
        caller_bytes: int = 0,
        devices: Iterable[torch.device] = (),
    ) -> None:
        """Make room for the state of more parameters; they get the next numbers, ``specs`` count
        from 0.

        ``caller_bytes`` of host memory are set aside for the caller, and those of a link to each
        of ``devices`` that has none yet. Raises ``BudgetError``, ``AioError`` (ENOSPC),
        ``RuntimeError`` of a device, and what a directory that cannot be used raises; nothing has
        changed then.
        """
        new = sorted({*devices} - self.links.keys(), key=str)
        taken = replace(self._taken, host_bytes=self._taken.host_bytes + caller_bytes)
        placement, taken, link_bytes = self._placed(specs, taken, len(new))
        undo = Undo()
        self._undo.push(undo.__exit__)
        try:
            links = {device: _opened_link(device, link_bytes, undo) for device in new}
            nbytes = self._take(placement, undo)
        except BaseException:
            undo.close()
            raise
        self.links.update(links)
        self._taken = Taken(
            host_bytes=taken.host_bytes + nbytes,
            slot_bytes=placement.slot_bytes or taken.slot_bytes,
        )
        self.checkpoint_bytes = placement.checkpoint_bytes

    def _placed(
        self, specs: Sequence[ParameterSpec], taken: Taken, num_links: int
    ) -> tuple[Placement, Taken, int]:
        """A placement, what is taken with new links, and the bytes of each of these: as many as are
        of use; or as few as work, where there is no room for more or they spare all traffic with
        the SSDs, which costs more than small loads do.
        """

        def placed(link_bytes: int) -> tuple[Placement, Taken, int]:
            all_taken = replace(taken, host_bytes=taken.host_bytes + num_links * link_bytes)
            budget = Budget(host_bytes=self.budget_bytes)
            return place_state(specs, self._rule, budget, all_taken), all_taken, link_bytes

        wanted, least = link_sizes(self.budget_bytes)
        with_least = placed(least)
        try:
            with_wanted = placed(wanted)
        except BudgetError:
            return with_least
        spares_all = with_wanted[0].nvme_bytes > 0 and not with_least[0].nvme_bytes
        return with_least if spares_all else with_wanted

    def groups_of(self, parameter: int) -> tuple[int, ...]:
        """The subgroups that hold the state of ``parameter``, by number."""
        return self._rooms[parameter].groups

    def sweep(self, left: set[int], work: Work, expect: Expect | None = None) -> None:
        """Call ``work`` with every subgroup of ``left``; each is taken out of it when that returns.
        ``expect`` hears of each one ahead.

        Raises ``AioError``, and what both raise; ``left`` then holds those that remain. The
        components of a subgroup hold anything until they are first written to.
        """
        self._sweeps.sweep([self._groups[number] for number in left], left, work, expect)

    def flush(self) -> None:
        """Bring everything home. Raises ``AioError``; a further call tries again."""
        self._sweeps.flush()

    def read(self, parameter: int, name: str, start: int, out: torch.Tensor) -> None:
        """Copy elements ``[start, start + len(out))`` of a component into ``out``, flat, on the
        CPU.

        For a flushed store; several threads may call. Raises ``AioError``.
        """
        room = self._rooms[parameter]
        room.components.read(room.index, name, start, out)

    def write(self, parameter: int, name: str, start: int, values: torch.Tensor) -> None:
        """Set elements ``[start, start + len(values))`` of a component.

        For a flushed store; several threads may write different elements. Raises ``AioError``.
        """
        room = self._rooms[parameter]
        room.components.write(room.index, name, start, values)

    def close(self) -> None:
        """Remove the swap files, and let go of all memory. Idempotent; raises nothing that happened
        in the background.
        """
        self._sweeps.let_end()
        self._undo.close()
        self.links.clear()  # which may hold weights and gradients of a step that was stopped
        self._groups, self._rooms, self._passage = [], [], None
        self._sweeps = Sweeps(self.timeline)

    # Making room.

    def _take(self, placement: Placement, undo: Undo) -> int:
        """Returns the bytes of memory that it takes. What can fail comes before what is noted."""
        opened = self.extents
        if placement.nvme_bytes:
            if opened is None:
                opened = open_extents(undo, self._directories, shares(self._directories))[1]
            opened.reserve(self.nvme_bytes + placement.nvme_bytes)
        sizes = slab_sizes(placement)
        if self._passage is not None:
            sizes.pop("passage", None)  # one serves all
        slabs = {name: slab_of(name, nbytes) for name, nbytes in sizes.items()}
        for slab in slabs.values():
            undo.callback(slab.close)
        passage = Passage(slabs["passage"]) if "passage" in slabs else self._passage
        components = ComponentStore(placement, self._rule, slabs.get("home"), opened, passage)
        if placement.num_slots:
            self._sweeps.replace_slots(slots_of(slabs["staging"], placement))
        self.nvme_bytes += placement.nvme_bytes
        self.extents, self._passage = opened, passage
        self._note(components, Staging(components, self._sweeps.free_slots, self.timeline))
        return sum(sizes.values())

    def _note(self, components: ComponentStore, staging: Staging[Staged]) -> None:
        layout, first, base = components.layout, len(self._groups), len(self._rooms)
        self._groups += [
            StateGroup(
                number=first + group.index,
                segments=tuple(replace(s, parameter=base + s.parameter) for s in group.segments),
                staged=Staged(group),
                staging=staging,
                is_home=components.is_array(group.index),
            )
            for group in layout.subgroups
        ]
        self._rooms += [
            _Room(components, spec.index, tuple(first + s for s in layout.subgroups_of(spec.index)))
            for spec in layout.specs
        ]


def _opened_link(device: torch.device, nbytes: int, undo: Undo) -> Link:
    """Until ``undo``, which waits for the streams of the device before it gives memory back."""
    opened = open_device(device)
    assert opened is not None
    slab = slab_of("link", nbytes)
    undo.callback(slab.close)
    register_all(opened, [slab], undo)
    return Link(opened, slab, NUM_SLOTS)
