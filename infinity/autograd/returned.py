"""Gradients that a backward function of Python returns from among what it had saved.

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


class _Arrivals:
    """At one node, which has it in its metadata, in one pass: the storages that gradients may not
    lie in.
    """

    def __init__(self, node: Any) -> None:
        self.storages: set[int] = set()
        self.is_over = False
        self._handle = node.register_prehook(self._own)

    @unseen
    def _own(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        self.is_over = True
        self._handle.remove()
        return tuple(
            gradient.clone() if gradient is not None and self._lies_there(gradient) else gradient
            for gradient in gradients
        )

    def _lies_there(self, gradient: torch.Tensor) -> bool:
        # A number that another storage has by now costs a copy.
        return torch._C._has_storage(gradient) and (
            gradient.untyped_storage()._cdata in self.storages
        )


def copy_where_returned(unpacked: torch.Tensor) -> None:
    """``unpacked`` is read by the function whose backward is at work on this thread, if any is: as
    a gradient of what comes next it is a copy.
    """
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction) or not torch._C._has_storage(unpacked):
        return
    storage = unpacked.untyped_storage()._cdata
    for following, _ in node.next_functions:
        if following is None:
            continue
        arrivals = following.metadata.get(_KEY)
        if arrivals is None or arrivals.is_over:
            arrivals = following.metadata[_KEY] = _Arrivals(following)
        arrivals.storages.add(storage)
