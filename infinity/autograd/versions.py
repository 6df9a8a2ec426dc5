"""Version counters: updates count, and changes behind the library's back are noticed. And what
becomes of views that lie where values were before a change.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn

from checkpoint import ChangedTensorError
from infinity.parameters.homes import Homes
from infinity.parameters.offloaded.becoming import is_ours
from infinity.parameters.offloaded.modes import unseen
from infinity.parameters.offloaded.placeholders import (
    about,
    placeholder,
    refusal_of_view,
    storage_of,
    unwrapped,
)
from infinity.parameters.records import Record
from infinity.parameters.structure import Structure
from swap.cache.owners import Held
from swap.memory.uses import root_of

_log = logging.getLogger(__name__)
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_REMEDY = (
    "change values inside `with offloaded.gathered([parameter], modify=True):`, which keeps them "
    "when the save has read what was there"
)

HeldWeights = Callable[[Set[int]], Sequence[Held]]
"""Where current weights of parameters are that autograd or the program refers to; none at home."""

_MOST_COUNTING_SECONDS = 1.0
"""More than it takes to count what changed."""

_MOMENT_SECONDS = 0.001
"""So long another thread may go on; a hundredth of what looking at all objects takes."""


class Weights(Protocol):
    """Where the weights of parameters are, as far as it matters here."""

    at_home: Homes
    """Those of parameters that are computed with where they are kept."""

    def working(self, *, elsewhere: bool = False) -> Set[int]:
        """Numbers of the forwards and operations that run, each another one; of all threads or of
        all but this.
        """

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
        """The part of ``check`` that is about changes in place."""
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
        now = self._versions_of(indices)
        noted = {index: self._noted[index] for index in indices}
        return [i for i in indices if now[i] != noted[i] and i not in self._weights.kept_out]

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


class KeptViews:
    """Views of weights that programs keep.

    They lie where the weights were as they were taken. In memory they would follow an update; here
    some would, and others keep what was there, by tier. So none has values once those of its
    parameter change, or are elsewhere.

    Those taken outside of forward passes are told as they are given out. Within forward passes
    parameters compute as any others, and nobody is told. But the weights of each are in a storage
    of their own: where that is in use before they change, and not by us, the tensors over it are
    looked for among all that Python's collector knows. What runs meanwhile on another thread may
    go on with those that it has, and may have been found with one in its hands: as long as it runs,
    no view that was found then is refused.
    """

    def __init__(self, records: Sequence[Record], held: HeldWeights, weights: Weights) -> None:
        self._records = records
        self._held = held
        self._weights = weights
        self._told: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._found: dict[int, dict[int, _Found]] = {}
        """By the ``id`` of the tensor: the values of the parameter are about to change."""
        self._late: dict[int, tuple[int, _Found]] = {}
        """Parameter and tensor, by number: the values have changed."""
        self._numbers = count()

    def add(self, index: int, view: torch.Tensor) -> None:
        """``view`` was handed out."""
        known = self._told.setdefault(index, [])
        if not len(known) & (len(known) + 1):  # at 1, 3, 7, ...: not each time, or many take long
            known[:] = [ref for ref in known if ref() is not None]
        known.append(weakref.ref(view))

    @unseen
    def find(self, indices: Iterable[int]) -> None:
        """The values of these parameters are about to change: what views programs have of them is
        known from now on.
        """
        self.settle()
        changing = {*indices}
        held = self._held_of(changing)
        if held:  # by a thread that has just read weights, perhaps, and only waits to let go of them
            time.sleep(_MOMENT_SECONDS)
            held = self._held_of(changing)
        if held:
            views = _views_over(held)
            others = self._weights.working(elsewhere=True)  # only now: one may just have begun
            for index, view in views:
                found = _Found(weakref.ref(view), _storage_of(view), others)
                self._found.setdefault(index, {})[id(view)] = found

    def _held_of(self, changing: Set[int]) -> dict[int, Held]:
        """What the program may have views of, by storage."""
        in_place = {*self._weights.held}
        at_home = self._weights.at_home.held(changing, in_place)
        return {one.storage: one for one in (*self._held(changing), *at_home)}

    def expire(self, indices: Iterable[int]) -> None:
        """The values of these parameters are others now, or elsewhere: each use of the views that
        are known of them raises ``RuntimeError`` from now on. Idempotent.
        """
        for index in indices:
            for view in self._told.get(index, ()):
                self._refuse(index, view())
            self._told.pop(index, None)
            late = [(index, found) for found in self._found.get(index, {}).values()]
            self._late.update(zip(self._numbers, late, strict=False))
            self._found.pop(index, None)
        self.settle()

    def expire_all(self) -> None:
        """As ``find`` and ``expire`` of everything, as the block ends."""
        self.find(range(len(self._records)))
        self.expire({*self._told, *self._found})

    def settle(self) -> None:
        """Refuse those that may have been in use on other threads, if that is over."""
        working = self._weights.working() if self._late else set()
        for number, (index, found) in [*self._late.items()]:
            if found.is_gone or found.others.isdisjoint(working):
                self._refuse(index, None if found.is_gone else found.view())
                self._late.pop(number, None)

    @unseen
    def _refuse(self, index: int, view: torch.Tensor | None) -> None:
        if view is None:
            return
        name = self._records[index].name
        try:
            with torch._C.DisableTorchFunctionSubclass():
                face = placeholder(*about(view), refusal_of_view(name))
                if not _REQUIRES_GRAD.__get__(view):  # or numpy would have refused it
                    object.__setattr__(view, "_memory_of_arrays", self._memory_of(view))
                _DATA.__set__(view, face)
        except Exception as error:  # of whatever kind: a step is under way
            _log.warning(
                "a view of %s, a %s, was kept over a change of its values and cannot be refused "
                "(%s): what it has is not defined; take it anew after each step",
                *(name, type(view).__name__, error),
            )

    def _memory_of(self, view: torch.Tensor) -> object:
        """What keeps the memory of ``view``. An array that numpy has made of it refers to the view
        and to an address, and so needs both for as long as it lives.
        """
        home = self._weights.at_home.memory_in(_storage_of(view))
        return torch.Tensor.untyped_storage(view) if home is None else home


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor, the storage that it was in, and what was at work on other threads then."""

    view: weakref.ref[torch.Tensor]
    storage: int
    others: Set[int]

    @property
    def is_gone(self) -> bool:
        """Whether it is no more, or is elsewhere: a program has given it other data."""
        view = self.view()
        return view is None or _storage_of(view) != self.storage


def _views_over(held: Mapping[int, Held]) -> list[tuple[int, torch.Tensor]]:
    """(parameter, tensor of the program over its weights), of all that there are."""
    gc.unfreeze()  # what a program froze is in no list
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        return [
            (one.parameter, view)
            for found in tensors
            if (one := held.get(_storage_of(found))) is not None
            and not is_ours(view := unwrapped(found))
            and root_of(view) != one.own
        ]


def _storage_of(tensor: torch.Tensor) -> int:
    """As ``storage_of``; 0 for what cannot be asked, which is no view of weights."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return storage_of(tensor)
    except Exception:  # of whatever kind: classes of programs may answer for themselves
        return 0
