"""Tensors that change while they are saved: noticed, so that nothing mixed is published.

torch counts the in-place changes of a tensor. A count that is higher when everything has been read
than when the save was called means that what was read may be old in one part and new in another. A
tensor that has other memory by then (`p.data = ...`, `set_`, a swap of tensors, a storage of
another size) may have had the old one reused: that is a change, too. Changes of one memory may be
counted on several tensors, each by itself: those of a DTensor are not counted on its local tensor.
All of them that are known are asked. What torch does not count (a
change through numpy, `.data`, or by another library) is noticed only where bytes are written from
where they lie: see `checkpoint.transfer.writer`. A byte source over memory that programs can change
says itself whether one did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch

from checkpoint.errors import ChangedTensorError
from checkpoint.tensors.held import HeldSource
from checkpoint.tensors.sources import Source


@runtime_checkable
class Watched(Protocol):
    """A byte source that knows when what it reads is changed by others."""

    def check_unchanged(self) -> None:
        """Raises ChangedTensorError if that happened since the save was called; on any thread."""

    def check_ended(self) -> None:
        """The same later, of changes alone that may have been under way just then, for torch counts
        a change when it has ended.
        """


class Versions:
    """How often the tensors behind some sources had been changed when this was made, and where
    they were.
    """

    def __init__(self, named: Iterable[tuple[str, Source]]) -> None:
        self._seen: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._aliases: list[tuple[str, torch.Tensor, int]] = []
        self._watched: list[Watched] = []
        for name, source in named:
            owner = source.owner
            if isinstance(owner, torch.Tensor):
                self._seen.append((name, owner, _state(owner)))
            elif isinstance(owner, HeldSource | Watched):
                self._watched.append(owner)
            self._aliases.extend((name, alias, _count(alias)) for alias in source.aliases)

    def check(self) -> None:
        """Raises ChangedTensorError naming a tensor that has been changed since."""
        for name, tensor, seen in self._seen:
            if _state(tensor) != seen:
                raise ChangedTensorError(name)
        for name, alias, count in self._aliases:
            if _count(alias) != count:
                raise ChangedTensorError(name)
        for source in self._watched:
            source.check_unchanged()

    def check_ended(self) -> None:
        """What changes that were under way when `check` looked have come to. Raises as that."""
        for source in self._watched:
            source.check_ended()


def count_changes(tensors: Iterable[torch.Tensor]) -> None:
    """Counts one change in place of each, for whoever writes to an address as torch does by itself:
    saves notice it, and autograd refuses a graph from before it.
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Its version and its address."""
    return _count(tensor), tensor.data_ptr()


def _count(tensor: torch.Tensor) -> int:
    """Its version, which tensors of the inference mode lack."""
    return 0 if tensor.is_inference() else tensor._version
