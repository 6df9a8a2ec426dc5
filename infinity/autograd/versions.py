"""Version counters: updates count, and changes behind the library's back are noticed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import torch
from torch import nn

from checkpoint import ChangedTensorError
from infinity.parameters.homes import Homes
from infinity.parameters.offloaded.modes import unseen
from infinity.parameters.records import Record
from infinity.parameters.structure import Structure

_REMEDY = (
    "change values inside `with offloaded.gathered([parameter], modify=True):`, which keeps them "
    "when the save has read what was there"
)


_MOST_COUNTING_SECONDS = 1.0
"""More than it takes to count what changed."""


class Weights(Protocol):
    """Where the weights of parameters are."""

    at_home: Homes
    """Those of parameters that are computed with where they are kept."""

    def working(self, *, elsewhere: bool = False) -> Set[int]:
        """Numbers of the forwards and operations that run; of all threads or of all but this."""

    @property
    def kept_out(self) -> Set[int]:
        """Parameters that are the program's to change, now."""

    @property
    def held(self) -> list[int]:
        """Parameters whose weights are in place now, for whichever thread. Without a lock."""


class Versions:
    """The version of every parameter as it was when it was last known to be meant so."""

    def __init__(self, records: Sequence[Record], weights: Weights) -> None:
        self._records = records
        self._weights = weights
        self._noted: list[int] = []
        self._told = [0] * len(records)
        self._updates = [0] * len(records)
        self._counting = threading.RLock()
        """Held while versions and what is known of them go apart."""
        self._structure: Structure | None = None

    def watch(self, model: nn.Module) -> None:
        """From now on ``model`` has these parameters, where they are, with the values they have."""
        self._structure = Structure(model)
        self.note()

    def note(self, indices: Iterable[int] | None = None) -> None:
        """Whatever changed these parameters (default: all) in place until now was meant to."""
        if indices is None:
            self._noted = self._now()
            return
        self._note_of(indices)

    @unseen
    def _note_of(self, indices: Iterable[int]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for index in indices:
                self._noted[index] = self._records[index].parameter._version

    def spread_changes(self, indices: Sequence[int]) -> None:
        """What changed one of these, which are lent, and are tiles of one weight, changed all: who
        writes into the whole, or a view of it, is counted by one.
        """
        changed = {self._whole_of(index) for index in self._changed(indices)} - {None}
        tiles = [index for index in indices if self._whole_of(index) in changed]
        torch.autograd.graph.increment_version([self._records[i].parameter for i in tiles])

    def _whole_of(self, index: int) -> object:
        return vars(self._records[index].parameter).get("tile_of")

    def _changed(self, indices: Sequence[int]) -> list[int]:
        now = self._versions_of(indices)
        return [index for index in indices if now[index] != self._noted[index]]

    def count_updates(self, indices: Sequence[int]) -> None:
        """Tell autograd, as an in-place update would: a graph from before it is refused."""
        with self._counting:
            torch.autograd.graph.increment_version([self._records[i].parameter for i in indices])
            for index in indices:
                self._updates[index] += 1
            self.note(indices)

    def updates_counted(self, index: int) -> int:
        """How often ``count_updates`` was told of this parameter."""
        return self._updates[index]

    def beside_updates(self, index: int, tensor: torch.Tensor) -> int:
        """The version of ``tensor``, which is that of the parameter, less those updates: on any
        thread it tells of the changes that others make.
        """
        with self._counting:
            return tensor._version - self._updates[index]

    def changes_told(self, index: int) -> int:
        """How often a change in place of a parameter was told as an error."""
        return self._told[index]

    def changed_copy(self, index: int, told: int) -> None:
        """A copy of a parameter that was made when so many changes were told was written to: count
        it as a change, but where it may be the one that was told since.
        """
        if told == self._told[index]:
            torch.autograd.graph.increment_version(self._records[index].parameter)

    def check(self) -> None:
        """What a program writes into weights may or may not reach their home.

        Raises ``RuntimeError`` naming a parameter that was changed in place, once for each change,
        or one that was put into the model.
        """
        if self._structure is not None:
            self._structure.check()
        self.check_values()

    def check_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """As ``check``, for an ``ExitStack``: an error that is on its way goes first."""
        if kind is None:
            self.check()

    def check_values(self) -> None:
        """As ``check``, of changes in place."""
        with self._counting:
            expected, now = [*self._noted], self._now()
        if expected == now:
            return
        changed = [
            index
            for index, version in enumerate(now)
            if version != expected[index] and index not in self._weights.kept_out
        ]
        for index in changed:
            self._told[index] += 1
        self.note(changed)  # only now, see ``changed_at_home``
        if changed:
            names = [self._records[index].name for index in changed]
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise RuntimeError(
                f"{names[0]}{more} was changed in place while it was offloaded (by an "
                "initialisation, an assignment, a merge of adapters, a collective, an optimizer "
                "other than offloaded.optimizer, or a module that changes its weights in forward, "
                "such as nn.Embedding with max_norm), and what it holds now is not defined; have "
                "them updated by offload(optimizer=), and change values inside `with "
                "offloaded.gathered([parameter], modify=True):`"
            )

    def watch_at_home(self) -> HomeWatch:
        """What tells from now on whether a program changes weights where they are kept."""
        return HomeWatch(self, tuple(self._told))

    def in_use(self, indices: Iterable[int]) -> set[int]:
        """Those of these parameters that something computes with now, and may be changing."""
        return {*self._weights.held}.intersection(indices)

    def changed_at_home(self, indices: Iterable[int], told: Sequence[int]) -> str | None:
        """The name of one of these parameters whose weights at home a program changed since so many
        changes were told. On any thread.
        """
        here = [index for index in indices if self._weights.at_home[index] is not None]
        if changed := self._untold(here):
            # A loan may have begun or ended, or updates be counted just now. Not for long: where
            # the lock is held the handler of a signal may run, and wait for the save that asks.
            is_held = self._counting.acquire(timeout=_MOST_COUNTING_SECONDS)
            try:
                changed = self._untold(changed)
            finally:
                if is_held:
                    self._counting.release()
        changed += [index for index in here if self._told[index] != told[index]]
        return self._records[min(changed)].name if changed else None

    def _untold(self, indices: Sequence[int]) -> list[int]:
        """Those with a change in place that was not told yet, in the order in which a loan that
        begins goes by: it is known as one before its version is another.
        """
        return [i for i in self._changed(indices) if i not in self._weights.kept_out]

    @unseen
    def _versions_of(self, indices: Iterable[int]) -> dict[int, int]:
        with torch._C.DisableTorchFunctionSubclass():
            return {index: self._records[index].parameter._version for index in indices}

    @unseen
    def _now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [record.parameter._version for record in self._records]


class HomeWatch:
    """Tells whether weights that a save reads where they are kept, and computed with, are still
    those of when this was made.
    """

    def __init__(self, versions: Versions, told: Sequence[int]) -> None:
        self._versions = versions
        self._told = told
        self._in_use: set[int] = set()

    def check(self, indices: Iterable[int]) -> None:
        """Raises ``ChangedTensorError`` naming one of these parameters that was changed in place,
        which have been read. On one thread.
        """
        indices = [*indices]
        self._in_use |= self._versions.in_use(indices)  # before versions are looked at
        self._check(indices)

    def check_ended(self) -> None:
        """The same of those that were in use then: a change is counted when it has ended."""
        self._check(self._in_use)

    def error_of(self, indices: Iterable[int], name: str) -> ChangedTensorError:
        """That of a change of one of these parameters that was found in their bytes; of ``name``
        where torch has not counted it, or not yet. On any thread.
        """
        return ChangedTensorError(
            self._versions.changed_at_home(indices, self._told) or name, _REMEDY
        )

    def _check(self, indices: Iterable[int]) -> None:
        name = self._versions.changed_at_home(indices, self._told)
        if name is not None:
            raise ChangedTensorError(name, _REMEDY)
