"""A gradient that is computed when it is taken, not when autograd gets it.

Autograd keeps the gradient of a leaf that is used in several places (a table that is tied to a
head) from the first of them in the backward pass to the last. Deferred, what it keeps of each tile
is the gradient of the output, which all tiles share, and not a gradient of the tile: no more than
one tile's is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from infinity.parameters.offloaded.assigned import when_flagged
from infinity.parameters.offloaded.modes import unseen

Make = Callable[[], torch.Tensor]
Maker = tuple[Make, int | None]
"""What gives a gradient, and which of its first dimension that is of; None: of all."""
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class DeferredGradient(torch.Tensor):
    """Stands for the sum of what its makers give, in their order; any other use computes it."""

    _makers: tuple[Maker, ...]
    _sum: torch.Tensor | None

    # Operations come to ``__torch_dispatch__``, with those of autograd's own.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(weight: torch.Tensor, make: Make, at: int | None = None) -> DeferredGradient:
        """The gradient of ``weight``, or of ``weight[at]`` with zeros around, that ``make`` gives
        when it is called.
        """
        return _made_by(((make, at),), weight.shape, weight.dtype, weight.device)

    def compute(self) -> torch.Tensor:
        """The gradient, added up as autograd does."""
        if self._sum is not None:
            return self._sum
        total: torch.Tensor | None = None
        with torch.no_grad():
            for make, at in self._makers:
                if total is None and at is None:
                    total = make()
                    continue
                if total is None:
                    total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
                (total if at is None else total[at]).add_(make())
        assert total is not None
        return total

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            first = args[0]
            return _made_by(first._makers, first.shape, first.dtype, first.device)
        if func in _SUMS and not kwargs and _is_sum(*args):
            first, second = args
            return _made_by(
                _makers_of(first) + _makers_of(second), first.shape, first.dtype, first.device
            )
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs))


def taken(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` in memory."""
    return gradient.compute() if isinstance(gradient, DeferredGradient) else gradient


def deferred(weight: torch.Tensor, make: Make, at: int | None = None) -> torch.Tensor:
    """What ``make`` gives: later, but where its own gradient is asked for (``create_graph``)."""
    gradient = DeferredGradient.of(weight, make, at)
    if not torch.is_grad_enabled():
        return gradient
    if at is None:
        return make()
    zeros = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return zeros.index_put((torch.tensor(at),), make())


def take_as_they_arrive(tiles: Sequence[torch.Tensor]) -> None:
    """Compute the gradients of ``tiles`` before hooks of the program, and who differentiates by
    them, have them: values kept by these are those of then, whatever becomes of the operands.
    """
    for tile in tiles:
        # The first hook of all: a parameter that comes with some is not cut.
        watch: Callable[[], object] = partial(tile.register_hook, _taken_unseen)
        if tile.requires_grad:
            watch()
        else:
            when_flagged(tile, watch)


_taken_unseen = unseen(taken)


def _made_by(
    makers: tuple[Maker, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> DeferredGradient:
    gradient: DeferredGradient = torch.Tensor._make_wrapper_subclass(
        DeferredGradient, shape, dtype=dtype, device=device
    )
    gradient._makers, gradient._sum = makers, None
    return gradient


def _is_sum(first: torch.Tensor, second: Any) -> bool:
    """Whether these are two gradients of one parameter, as autograd adds them."""
    is_alike = isinstance(second, torch.Tensor) and second.shape == first.shape
    return is_alike and isinstance(first, DeferredGradient) and second.dtype == first.dtype


def _makers_of(gradient: torch.Tensor) -> tuple[Maker, ...]:
    if isinstance(gradient, DeferredGradient):
        return gradient._makers
    return ((gradient.clone, None),)


def _computed(value: Any) -> Any:
    """A deferred gradient that a program holds is computed once."""
    if isinstance(value, DeferredGradient):
        value._sum = value.compute()
        return value._sum
    return value
