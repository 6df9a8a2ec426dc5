"""The parameters of an ``OffloadedAdamW`` that have room for their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from infinity.adamw.member import Held, Member, member_of, spec_of
from infinity.adamw.tiers.store import StateStore
from infinity.adamw.tiers.update import TRANSFER_BYTES
from swap.device.opening import is_separate
from swap.plan.layout import ParameterSpec


class Members:
    """Members by parameter. The number of each is that of its room in ``store``, which alone
    counts them.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._members: dict[int, Member] = {}
        self._has_transfer = False

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._members

    def of(self, parameter: torch.Tensor) -> Member:
        """Raises ``KeyError`` for one without room."""
        return self._members[id(parameter)]

    @property
    def devices(self) -> set[torch.device]:
        return {member.device for member in self}

    def named(self, names: Mapping[int, str]) -> dict[str, Member]:
        """By the names of now, in their order; none that left the groups."""
        return {name: self._members[key] for key, name in names.items() if key in self._members}

    def rename(self, names: Mapping[int, str]) -> None:
        """What they are called from now on, by ``id`` of the parameter."""
        for known in self._members.keys() & names.keys():
            self._members[known].name = names[known]

    def place(self, parameters: Iterable[torch.Tensor], names: Mapping[int, str]) -> None:
        """Make room for the state of ``parameters``, which have none, each given once.

        Raises as ``member_of`` and ``StateStore.add``; nothing has changed then.
        """
        members: list[Member] = []
        specs: list[ParameterSpec] = []
        for number, parameter in enumerate(parameters, self._store.num_parameters):
            members.append(member_of(parameter, names[id(parameter)], number))
            specs.append(spec_of(members[-1], len(specs)))
        devices = {member.device for member in members}
        linked = {device for device in devices if is_separate(device)}
        needs_transfer = any(device.type != "cpu" for device in devices - linked)
        transfer = TRANSFER_BYTES if needs_transfer and not self._has_transfer else 0
        self._store.add(specs, caller_bytes=transfer, devices=linked)
        self._has_transfer = self._has_transfer or needs_transfer
        self._members.update({id(member.parameter): member for member in members})

    def forget_all_but(self, kept: Iterable[Member]) -> None:
        """The others have no state any more, only room for it."""
        numbers = {member.number for member in kept}
        for member in self:
            if member.number not in numbers:
                member.steps, member.held = 0, Held.NOTHING
