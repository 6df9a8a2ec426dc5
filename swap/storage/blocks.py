"""Components at home in memory: an array each, and for some subgroups a block beside it.

An update changes arrays in place. Where a subgroup has a *spare* block its new values may be made
there instead, while the old ones stay at home until ``publish``: then the block is home, and what
was home is the spare. Weights alone never move, since they are computed with where they are and
programs keep views of them: their new values are copied home (2 of 12 bytes).

Invariants: a block is written while it is spare only, and turns into home in one step; who reads
at home sees the old values or the new ones of a subgroup, and no mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import torch

from swap.kernels import copy_values
from swap.plan.layout import Component, Layout, Subgroup

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""So many bytes of memory, flat."""
Block = Mapping[str, torch.Tensor]
"""The arrays of a subgroup by the names of its components."""


@dataclass(frozen=True, slots=True)
class _Pair:
    home: Block
    spare: Block | None = None


class Blocks:
    """Those of ``subgroups``; ``spared`` are the ones that have two of them."""

    def __init__(
        self,
        layout: Layout,
        components: Sequence[Sequence[Component]],
        subgroups: Set[int],
        spared: Set[int],
        allocate: Allocate,
    ) -> None:
        assert spared <= subgroups
        self._layout = layout
        self._components = components
        self._allocate = allocate
        self._blocks: dict[int, _Pair] = {}
        self._lost: list[Block] = []
        for unit in layout.units:
            groups = layout.subgroups[unit.first : unit.first + unit.num_subgroups]
            at_home = [group for group in groups if group.index in subgroups]
            if at_home:
                self._map_unit(at_home, spared)

    def array(self, subgroup: int, name: str) -> torch.Tensor:
        """What is at home of a component."""
        return self._blocks[subgroup].home[name]

    def block(self, subgroup: int) -> Block:
        """What is at home of all components."""
        return self._blocks[subgroup].home

    def values(self, parameter: int, component: Component) -> torch.Tensor | None:
        """One component of a parameter as one flat view, if all of it is here and in a row."""
        segments = self._layout.segments_of[parameter]
        if not all(segment.subgroup in self._blocks for segment in segments):
            return None
        arrays = [self.array(segment.subgroup, component.name) for segment in segments]
        if not all(_is_behind(one, other) for one, other in pairwise(arrays)):
            return None
        count = component.count(self._layout.specs[parameter].numel)
        first = arrays[0].storage_offset() + segments[0].offset // component.per
        return arrays[0].as_strided((count,), (1,), first)

    # Updates beside what is at home. By one thread.

    def has_spare(self, subgroup: int) -> bool:
        blocks = self._blocks.get(subgroup)
        return blocks is not None and blocks.spare is not None

    def spare(self, subgroup: int) -> Block:
        """Where the new values are to be made; whatever it has now is no longer needed."""
        spare = self._blocks[subgroup].spare
        assert spare is not None
        return spare

    def lose_spare(self, subgroup: int) -> None:
        """Somebody may still write to it: nobody uses it any more, and its memory stays taken."""
        blocks = self._blocks[subgroup]
        if blocks.spare is not None:
            self._lost.append(blocks.spare)
            self._blocks[subgroup] = _Pair(blocks.home)

    def publish(self, subgroup: int) -> None:
        """What the spare block has is at home from now on."""
        home, spare = self._blocks[subgroup].home, self.spare(subgroup)
        stays = {name: array for name, array in home.items() if name == "weight"}
        new = _Pair(home={**spare, **stays}, spare={**home, **_only(spare, stays)})
        for name, array in stays.items():
            copy_values(spare[name], array)
        self._blocks[subgroup] = new

    def _map_unit(self, unit: Sequence[Subgroup], spared: Set[int]) -> None:
        """One array a component for the whole unit, so that a split parameter is in a row."""
        homes: dict[int, dict[str, torch.Tensor]] = {group.index: {} for group in unit}
        for component in self._components[unit[0].index]:
            nbytes = component.nbytes(sum(group.numel for group in unit))
            whole = self._allocate(nbytes, component.dtype)
            first = 0
            for group in unit:
                homes[group.index][component.name] = whole[component.part(first, group.numel)]
                first += group.numel
        for group in unit:
            spare = self._new_block(group) if group.index in spared else None
            self._blocks[group.index] = _Pair(homes[group.index], spare)

    def _new_block(self, group: Subgroup) -> Block:
        return {
            component.name: self._allocate(component.nbytes(group.numel), component.dtype)[
                component.part(0, group.numel)
            ]
            for component in self._components[group.index]
        }


def _only(block: Block, names: Block) -> Block:
    return {name: block[name] for name in names}


def _is_behind(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``other`` begins where ``one`` ends, in one storage."""
    is_shared = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return is_shared and one.storage_offset() + one.numel() == other.storage_offset()
