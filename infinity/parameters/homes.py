"""Weights that are computed with where they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Protocol

import torch

from infinity.parameters.records import Record
from swap.cache.owners import Held
from swap.memory.uses import other_uses, own_storage, root_of, storage_at


class Weights(Protocol):
    """See ``swap.cache.weight_cache.WeightCache``."""

    def at_home(self, parameter: int) -> torch.Tensor | None:
        """Weights, flat, if they are computed with where they are kept."""


class Homes:
    """By parameter, in its shape; None for those that are elsewhere. Each is in a storage of its
    own, so that what else lies there is known.
    """

    def __init__(self, records: Sequence[Record], weights: Weights) -> None:
        self._records = records
        self._weights = weights
        self._homes = [self._home(record) for record in records]
        homes = enumerate(self._homes)
        self._by_storage = {storage_at(home): i for i, home in homes if home is not None}

    def _home(self, record: Record) -> torch.Tensor | None:
        weight = self._weights.at_home(record.index)
        return None if weight is None else own_storage(weight, record.shape)

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self._homes[index]

    def parameter_in(self, storage: int) -> int | None:
        """That whose weights are the storage of this ``_cdata``."""
        index = self._by_storage.get(storage)
        home = None if index is None else self._homes[index]
        return None if home is None or storage_at(home) != storage else index

    def memory_in(self, storage: int) -> torch.Tensor | None:
        """What keeps the memory of weights in that storage, and is not in it."""
        index = self.parameter_in(storage)
        return None if index is None else self._weights.at_home(index)

    def held(self, indices: Iterable[int], in_place: Set[int]) -> Iterator[Held]:
        """Of these parameters those whose weights the program refers to; what is ``in_place`` now
        does so itself.
        """
        for index in indices:
            home = self._homes[index]
            if home is not None and other_uses(home) > (index in in_place):
                yield Held(index, storage_at(home), root_of(home))

    def come_home(self, indices: Iterable[int]) -> None:
        """Where a program had torch move the memory of a weight, to share it with other processes,
        that is the program's from now on, and the weight is computed with at home again.
        """
        for index in indices:
            old, kept = self._homes[index], self._weights.at_home(index)
            if old is not None and kept is not None and old.data_ptr() != kept.data_ptr():
                new = own_storage(kept, old.shape)
                self._by_storage.pop(storage_at(old), None)
                self._by_storage[storage_at(new)] = index
                self._homes[index] = new
