"""Gradients that a backward function of a program returns from among what it had saved.

Torch makes a gradient the ``.grad`` of a leaf as it is, memory included, when nobody else refers to
that tensor. What hooks have unpacked is such a tensor, over memory that is not its own: the
program's, a weight's, a saved tensor's. Without hooks it is what was saved itself, to which others
do refer, and it is copied (``torch/csrc/autograd/functions/accumulate_grad.h``). So gradients that
come from such a function are looked at where they arrive, and copied there: not where saved tensors
are read, since a function may as well change what it saved.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from infinity.activations.offloading import is_of_program
from infinity.parameters.offloaded.modes import unseen

_KEY = "infinity.returned"
_LEAF = "AccumulateGrad"


class _Pass:
    """One backward pass. The engine has the only reference, so it goes with the pass, also where
    that fails.

    ``expected``: by the node where gradients arrive, the storages that a leaf's may not lie in.
    """

    def __init__(self) -> None:
        self.expected: dict[_Arrivals, set[int]] = {}

    def end(self) -> None:
        """What the engine calls last."""
        self.expected.clear()


_passes: dict[int, weakref.ref[_Pass]] = {}
"""By the numbers that torch gives them, and no other later. Functions run passes of their own, and
threads theirs, over the same leaves.
"""


class _Arrivals:
    """At one node, which has it in its metadata. A leaf takes no gradient that lies where a pass
    expects one; other nodes pass them on (views of them), so it goes on with those.
    """

    def __init__(self, node: Any) -> None:
        node.register_prehook(self._own)

    @unseen
    def _own(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...] | None:
        known = _passes.get(torch._C._current_graph_task_id())
        at_work = None if known is None else known()
        if at_work is None:
            return None
        # A number that another storage has by now costs a copy, or a look at the next nodes.
        expected = at_work.expected.pop(self, set())
        found = expected.intersection(map(_storage_of, gradients))
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
    if is_of_program(node) and (storage := _storage_of(unpacked)) is not None:
        _expect(node, storage)


def _expect(node: Any, storage: int) -> None:
    """Gradients that ``node`` gives in this pass may lie in ``storage``."""
    expected = _pass_at_work().expected
    for following, _ in node.next_functions:
        if following is None:
            continue
        arrivals = following.metadata.get(_KEY)
        if arrivals is None:  # of two threads that come here one stays, by a call that C makes
            arrivals = following.metadata.setdefault(_KEY, _Arrivals(following))
        expected.setdefault(arrivals, set()).add(storage)


def _pass_at_work() -> _Pass:
    number = torch._C._current_graph_task_id()
    known = _passes.get(number)
    at_work = None if known is None else known()
    if at_work is None:
        for gone in [number for number, one in [*_passes.items()] if one() is None]:
            _passes.pop(gone, None)
        new = _Pass()
        at_work = _passes.setdefault(number, weakref.ref(new))() or new
        if at_work is new:
            torch.autograd.Variable._execution_engine.queue_callback(new.end)
    return at_work


def _storage_of(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or not torch._C._has_storage(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """With each element that is there once, as ``expand`` has them."""
    once = tuple(slice(None if stride else 1) for stride in gradient.stride())
    return gradient[once].clone().expand(gradient.shape)
