"""Gradients of tiles: computed when they are taken, not when autograd gets them; as the gradient of
the parameter that is in tiles; and refused where they would reach what only stands for it.

Autograd keeps the gradient of a leaf that is used in several places (a table that is tied to a
head) from the first of them in the backward pass to the last. Deferred, what it keeps of each tile
is the gradient of the output, which all tiles share, and not a gradient of the tile: no more than
one tile's is ever in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.parameters.offloaded.assigned import assigned, when_flagged
from infinity.parameters.offloaded.gradient import GradientOwner, OffloadedGradient
from infinity.parameters.offloaded.histories import ChangeCount
from infinity.parameters.offloaded.modes import own_modes, unseen
from infinity.parameters.offloaded.placeholders import as_they_are, refusal_past_tiles
from infinity.tiling.tile import Tile

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
    __torch_function__: Any = torch._C._disabled_torch_function_impl

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


class GradientOfTiles:
    """Keeps the gradient of a parameter whose tiles have the rows of it: the owner of an
    ``OffloadedGradient``, of which there is one, 0.
    """

    def __init__(self, tiles: Sequence[Tile], name: str) -> None:
        self._tiles = tiles
        self._name = name

    def is_there(self) -> bool:
        """Whether all tiles have gradients, and these are offloaded."""
        parts = [tile.parameter.grad for tile in self._tiles]
        return all(isinstance(part, OffloadedGradient) for part in parts)

    def gradient_age(self, _: int) -> int:
        return sum(owner.gradient_age(index) for owner, index in self._owners())

    def gradient_counts(self, _: int) -> list[ChangeCount]:
        return [count for owner, index in self._owners() for count in owner.gradient_counts(index)]

    @own_modes
    def gradient_values(self, _: int, age: int) -> torch.Tensor:
        self._check(age)
        return torch.cat(
            [
                owner.gradient_values(index, owner.gradient_age(index))
                for owner, index in self._owners()
            ]
        )

    def keep_gradient(self, _: int, values: torch.Tensor) -> None:
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.keep_gradient(index, rows)

    def overwrite_gradient(self, _: int, age: int, values: torch.Tensor) -> None:
        self._check(age)
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.overwrite_gradient(index, owner.gradient_age(index), rows)

    def assign(self, whole: torch.Tensor, gradient: Any) -> None:
        """Replace it by what a program assigns to ``whole``, which stands for the parameter; or,
        with None, clear it.
        """
        if gradient is not None:
            gradient = assigned(self._name, whole, gradient)
            is_dense = gradient.layout == torch.strided  # others cannot be cut
            gradient = gradient if is_dense else gradient.to_dense()
        for tile, rows in zip(self._tiles, self._rows(), strict=True):
            tile.parameter.grad = None if gradient is None else gradient[rows]

    def name_of(self, _: int) -> str:
        return self._name

    def _check(self, age: int) -> None:
        if age != self.gradient_age(0):
            raise RuntimeError(
                f"the gradient of {self._name} has been cleared or replaced since it was taken; "
                "read the parameter's grad again"
            )

    def _owners(self) -> list[tuple[GradientOwner, int]]:
        offloaded: list[Any] = [tile.parameter for tile in self._tiles]
        return [(part.offload_owner, part.offload_index) for part in offloaded]

    def _rows_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Copies: a store that keeps rows must not keep the whole."""
        return [values[rows].clone() for rows in self._rows()]

    def _rows(self) -> list[slice]:
        first = self._tiles[0].start
        return [slice(tile.start - first, tile.stop - first) for tile in self._tiles]


def watch_arrivals(whole: Any, name: str, tiles: Sequence[nn.Parameter]) -> None:
    """Refuse gradients that reach ``whole``, which stands for the ``tiles``, where none of these
    would get them: functions of autograd take it without a word. What is not trained has none until
    a tile is flagged.
    """
    stands = weakref.ref(whole)  # a parameter is itself again after the block, whatever is left

    def refuse(gradient: torch.Tensor | None) -> None:
        if type(stands()) is nn.Parameter or gradient is None:
            return
        if any(tile.requires_grad for tile in tiles):
            raise RuntimeError(refusal_past_tiles(name))

    def watch() -> None:
        face: Any = torch.Tensor  # its own methods: those of a tiled weight are about the tiles
        standing: Any = stands()
        if standing is None or vars(standing).get("_cut_arrivals") is not None:
            return
        with torch._C.DisableTorchFunctionSubclass(), as_they_are():
            face.requires_grad_(standing)
            standing._cut_arrivals = face.register_hook(standing, refuse)

    if any(tile.requires_grad for tile in tiles):
        return watch()
    for tile in tiles:
        when_flagged(tile, watch)


_OUTPUT_NR: Any = torch.Tensor.output_nr
OF_GRADIENT = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    _OUTPUT_NR.__get__,
)
"""What hooks on gradients and ``get_gradient_edge`` call."""


def asks_for_node(func: Any, args: Any) -> bool:
    """Whether it is a view that autograd's node for a parameter is reached through."""
    is_view = func in (torch.Tensor.expand_as, torch.Tensor.view_as) and args[0] is args[1]
    return is_view and torch.is_grad_enabled() and bool(args[0].requires_grad)
