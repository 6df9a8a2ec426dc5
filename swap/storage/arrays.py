"""Components that are arrays, in host memory or on a device with memory of its own.

What is on a device never moves, and is updated in place. So is what is in host memory, but for
subgroups with a spare block, see ``blocks``.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch

from swap.device.homes import DeviceHomes
from swap.plan.layout import Component
from swap.plan.placement import Placement
from swap.storage.blocks import Allocate, Blocks
from swap.tiers import Tier


class Arrays:
    """Those of a placement: ``components`` by subgroup. ``allocate`` makes those in HOST; ``homes``
    has those that are on a device.
    """

    def __init__(
        self,
        placement: Placement,
        components: tuple[tuple[Component, ...], ...],
        allocate: Allocate,
        homes: DeviceHomes | None,
    ) -> None:
        self._layout = placement.layout
        self._home = placement.state_home
        self._components = components
        self._homes = homes

        def blocks(tier: Tier, allocate: Allocate, spared: Set[int]) -> Blocks:
            there = {index for index, home in enumerate(self._home) if home is tier}
            return Blocks(self._layout, components, there, spared, allocate)

        self.on_host = blocks(Tier.HOST, allocate, placement.spared)
        self._on_device = blocks(Tier.DEVICE, self._allocate_on_device, frozenset())
        self._weights = tuple(
            None if spec.state_only else self.values(spec.index, "weight")
            for spec in self._layout.specs
        )

    def _allocate_on_device(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._homes is not None
        return self._homes.allocate(nbytes // dtype.itemsize, dtype)

    def _blocks_of(self, subgroup: int) -> Blocks:
        return self._on_device if self.is_on_device(subgroup) else self.on_host

    def is_on_device(self, subgroup: int) -> bool:
        return self._home[subgroup] is Tier.DEVICE

    def of(self, subgroup: int, name: str) -> torch.Tensor:
        """The array of a component, where it is."""
        return self._blocks_of(subgroup).array(subgroup, name)

    def values(self, parameter: int, name: str) -> torch.Tensor | None:
        """One component of a parameter as one flat view, if it is in one memory, in a row."""
        subgroup = self._layout.segments_of[parameter][0].subgroup
        if self._home[subgroup] is Tier.NVME:
            return None
        return self._blocks_of(subgroup).values(parameter, self._component(subgroup, name))

    def weight(self, parameter: int, *, on_host: bool) -> torch.Tensor | None:
        """The weights of a parameter as one flat view, if all of them are on the device, or
        ``on_host`` in HOST.
        """
        weight = self._weights[parameter]
        if weight is None:
            return None
        is_host = not self.is_on_device(self._layout.segments_of[parameter][0].subgroup)
        return weight if is_host is on_host else None

    def _component(self, subgroup: int, name: str) -> Component:
        return next(one for one in self._components[subgroup] if one.name == name)

    # Values.

    def read(self, subgroup: int, name: str, first: int, out: torch.Tensor) -> None:
        """Copy values from ``first`` on into ``out`` (flat, CPU)."""
        here = self.of(subgroup, name)[first : first + out.numel()]
        homes = self._homes_of(subgroup)
        if homes is None:
            out.copy_(here)
        else:
            homes.read(here, out)

    def write(self, subgroup: int, name: str, first: int, values: torch.Tensor) -> None:
        """Set values from ``first`` on."""
        here = self.of(subgroup, name)[first : first + values.numel()]
        homes = self._homes_of(subgroup)
        if homes is None:
            here.copy_(values)
        else:
            homes.write(here, values)

    def zero(self, name: str) -> None:
        """Make all arrays of that name zeros."""
        for group, components in enumerate(self._components):
            if self._home[group] is not Tier.NVME and any(one.name == name for one in components):
                array = self.of(group, name)
                with self._changing(group, [array], []):
                    array.zero_()

    # Order, on a device.

    def updating(self, subgroup: int, gradient: torch.Tensor) -> AbstractContextManager[None]:
        """Operations inside change components of ``subgroup`` by its ``gradient``; if these are
        arrays, where they are.
        """
        if not self.is_on_device(subgroup):
            return nullcontext()
        arrays = [self.of(subgroup, one.name) for one in self._components[subgroup]]
        return self._changing(subgroup, arrays, [gradient])

    def _changing(
        self, subgroup: int, arrays: Sequence[torch.Tensor], by: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        homes = self._homes_of(subgroup)
        return nullcontext() if homes is None else homes.updating(subgroup, arrays, by=by)

    def before_compute(self, parameter: int) -> None:
        """What this thread computes from now on, with weights that are on a device, comes after
        their last update.
        """
        weight = self.weight(parameter, on_host=False)
        if weight is not None and self._homes is not None:
            self._homes.before_compute(self._layout.subgroups_of(parameter))
            self._homes.uses(weight)

    def _homes_of(self, subgroup: int) -> DeviceHomes | None:
        return self._homes if self.is_on_device(subgroup) else None
