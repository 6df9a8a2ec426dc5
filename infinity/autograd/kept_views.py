"""What becomes of views of weights that programs keep once values change."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch

from infinity.autograd.versions import Weights
from infinity.parameters.frames import number_of_next
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
from swap.cache.owners import Held
from swap.memory.uses import known_tensors, root_of

_log = logging.getLogger(__name__)
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad

_MOMENT_SECONDS = 0.001
"""So long another thread may go on; a hundredth of what looking at all objects takes."""


class HeldWeights(Protocol):
    """Where weights of parameters are that autograd or the program refers to; none at home."""

    def __call__(self, parameters: Set[int], *, outdated: bool = False) -> Sequence[Held]:
        """Current ones, or those from before they got new values."""


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
        self._alone_from: int | None = None

    def add(self, index: int, view: torch.Tensor) -> None:
        """``view`` was handed out."""
        known = self._told.setdefault(index, [])
        if not len(known) & (len(known) + 1):  # at 1, 3, 7, ...: not each time, or many take long
            known[:] = [ref for ref in known if ref() is not None]
        known.append(weakref.ref(view))

    def find(self, indices: Iterable[int]) -> None:
        """The values of these parameters are about to change: what views programs have of them is
        known from now on.
        """
        self.settle()
        self._alone_from = self._now_alone()
        self._find({*indices}, outdated=False)

    def _now_alone(self) -> int | None:
        """How many forwards and operations have begun; None if one runs on another thread."""
        return None if self._weights.working(elsewhere=True) else number_of_next()

    @unseen
    def _find(self, changing: Set[int], *, outdated: bool) -> None:
        held = self._held_of(changing, outdated)
        if held:  # by a thread that has just read weights, perhaps, and is to let go of them
            time.sleep(_MOMENT_SECONDS)
            held = self._held_of(changing, outdated)
        if held:
            views = _views_over(held)
            others = self._weights.working(elsewhere=True)  # only now: one may just have begun
            for index, view in views:
                found = _Found(weakref.ref(view), _storage_of(view), others)
                self._found.setdefault(index, {})[id(view)] = found

    def _held_of(self, changing: Set[int], outdated: bool) -> dict[int, Held]:
        """What the program may have views of, by storage."""
        in_place = set() if outdated else {*self._weights.held}
        at_home = self._weights.at_home.held(changing, in_place)
        elsewhere = self._held(changing, outdated=outdated)
        return {one.storage: one for one in (*elsewhere, *at_home)}

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

    def expire_outdated(self, indices: Collection[int]) -> None:
        """As ``expire``, and no use of one of these parameters gets the values from before any
        more: so does what other threads took of them since ``find``.
        """
        alone_from = self._alone_from  # once: other threads may look for views beside a step
        if alone_from is None or self._now_alone() != alone_from + 1:
            self._find({*indices}, outdated=True)
        self.expire(indices)

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
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (one.parameter, view)
            for found in known_tensors()
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
