"""Gradients that a backward function of a program returns from among what it had saved.

Torch makes a gradient the ``.grad`` of a leaf as it is, memory included, when nobody else refers to
that tensor. What hooks have unpacked is such a tensor, over memory that is not its own: the
program's, a weight's, a saved tensor's. Without hooks it is what was saved itself, to which others
do refer, and it is copied (``torch/csrc/autograd/functions/accumulate_grad.h``). So gradients that
come from such a function are looked at where they arrive, and copied there: not where saved tensors
are read, since a function may as well change what it saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from infinity.parameters.offloaded.modes import unseen

_KEY = "infinity.returned"
_EXTENSION, _LEAF = "CppFunction", "AccumulateGrad"


class _Arrivals:
    """At one node, which has it in its metadata, in one pass: the storages that a leaf's gradients
    may not lie in. Other nodes pass them on (views of them), so it goes on with those.
    """

    def __init__(self, node: Any) -> None:
        self.storages: set[int] = set()
        self.is_over = False
        self._handle = node.register_prehook(self._own)

    @unseen
    def _own(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...] | None:
        self.is_over = True
        self._handle.remove()
        # A number that another storage has by now costs a copy, or a look at the next nodes.
        found = self.storages.intersection(map(_storage_of, gradients))
        node: Any = torch._C._current_autograd_node()
        if type(node).__name__ != _LEAF:
            for storage in found:
                _expect(node, storage)
            return None
        return tuple(
            _copy(gradient) if gradient is not None and _storage_of(gradient) in found else gradient
            for gradient in gradients
        )


def copy_where_returned(unpacked: torch.Tensor) -> None:
    """``unpacked`` is read by the function whose backward is at work on this thread, if any is: as
    the gradient of a leaf it is a copy.
    """
    node: Any = torch._C._current_autograd_node()
    if _is_of_program(node) and (storage := _storage_of(unpacked)) is not None:
        _expect(node, storage)


def _expect(node: Any, storage: int) -> None:
    """Gradients that ``node`` gives may lie in ``storage``."""
    for following, _ in node.next_functions:
        if following is None:
            continue
        arrivals = following.metadata.get(_KEY)
        if arrivals is None or arrivals.is_over:
            arrivals = following.metadata[_KEY] = _Arrivals(following)
        arrivals.storages.add(storage)


def _is_of_program(node: Any) -> bool:
    """Whether it is a function of Python, or one of an extension in C++, which has no type of its
    own: those of torch itself return nothing that they saved.
    """
    return isinstance(node, BackwardCFunction) or type(node).__name__ == _EXTENSION


def _storage_of(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or not torch._C._has_storage(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """With each element that is there once, as ``expand`` has them."""
    once = tuple(slice(None if stride else 1) for stride in gradient.stride())
    return gradient[once].clone().expand(gradient.shape)
