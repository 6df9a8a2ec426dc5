"""Hooks for saved tensors on the stack that each thread has of them: put on, and taken off from
where they lie there, whatever was put on them meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Pair: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What packs a tensor, and what unpacks that."""


def top() -> Pair | None:
    """The innermost of this thread, which alone autograd calls."""
    pair: Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


class Hooks(ABC):
    """To be put on once. An interrupt may keep that from its end; ``take_off`` undoes it."""

    def __init__(self) -> None:
        self.outer: Pair | None = None
        """Those of the program that these are put on, which nobody else calls."""
        self._own: Pair = self.pack, self.unpack
        self._aside: list[Pair] = []
        self._is_off = False

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of ``tensor``."""

    @abstractmethod
    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that ``packed`` stands for."""

    def put_on(self) -> None:
        """Innermost on this thread."""
        below = top()
        ours = None if below is None else getattr(below[0], "__self__", None)
        self.outer = ours.outer if isinstance(ours, Hooks) else below
        torch._C._autograd._push_saved_tensors_default_hooks(*self._own)

    def take_off(self) -> None:
        """These and no others, on the thread that they were put on. Idempotent; can be called again
        after an interrupt.
        """
        if self._is_off:
            return
        if self._aside and _is_top(self._aside[-1]):  # an interrupt came between the two
            _pop()
        while top() is not None and not _is_top(self._own):
            self._aside.append(_pair_on_top())
            _pop()
        if _is_top(self._own):
            _pop()
        while self._aside:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._aside[-1])
            self._aside.pop()
        self._is_off = True


def _pair_on_top() -> Pair:
    pair = top()
    assert pair is not None
    return pair


def _is_top(pair: Pair) -> bool:
    found = top()
    return found is not None and found[0] is pair[0]


def _pop() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
