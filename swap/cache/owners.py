"""Which parameter's weights a storage holds, for code that finds a tensor over that storage.

A program may hold a view of weights for longer than the arena keeps them. The bytes of the storage
are still those weights, until they are updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from swap.memory.uses import root_of

_FIRST_LOOK = 64
"""So many storages are noted before it is looked for dead ones."""


class Held(NamedTuple):
    """Current weights of a parameter that somebody refers to, and what of that is no program's."""

    parameter: int
    storage: int
    """Its ``_cdata``."""
    own: int
    """The ``_cdata`` of the tensor that ours over that storage are views of."""


class Owners:
    """Parameters by storages with their current weights, while any tensor refers to those."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Held, int, StorageWeakRef]] = {}
        """By ``_cdata`` of the storage: what is there, the age of the parameter, the storage."""
        self._before: dict[int, tuple[Held, int, StorageWeakRef]] = {}
        """The same, of what was noted before a ``clear`` and is still in use."""
        self._ages: Counter[int] = Counter()
        self._look_at = _FIRST_LOOK

    def note(self, weight: torch.Tensor, parameter: int) -> None:
        """The storage of ``weight`` is for the weights of ``parameter``."""
        if len(self._noted) >= self._look_at:
            self._noted, self._before = _alive(self._noted), _alive(self._before)
            self._look_at = 2 * len(self._noted) + _FIRST_LOOK
        where = weight.untyped_storage()
        held = Held(parameter, where._cdata, root_of(weight))
        self._noted[where._cdata] = (held, self._ages[parameter], StorageWeakRef(where))

    def of(self, storage: int) -> int | None:
        """The parameter whose weights are in the storage of that ``_cdata``, which is alive."""
        noted = self._noted.get(storage)
        if noted is None:
            return None
        held, age, where = noted
        is_current = age == self._ages[held.parameter] and not where.expired()
        return held.parameter if is_current else None

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        """Where the weights of these are that they have had since they got new values, or, if
        ``outdated``, before; for as long as anybody refers to them.
        """
        return [
            held
            for held, age, where in [*self._noted.values(), *self._before.values()]
            if held.parameter in parameters
            and (age != self._ages[held.parameter]) is outdated
            and not where.expired()
        ]

    def outdate(self, parameters: Iterable[int]) -> None:
        """These get new values: what is noted of them now holds old ones."""
        self._ages.update(parameters)

    def clear(self) -> None:
        """Any values may have changed: what is noted is to be computed with no more."""
        noted, self._noted = self._noted, {}
        self._before = _alive(self._before | noted)


def _alive(
    noted: dict[int, tuple[Held, int, StorageWeakRef]],
) -> dict[int, tuple[Held, int, StorageWeakRef]]:
    return {key: one for key, one in noted.items() if not one[2].expired()}
