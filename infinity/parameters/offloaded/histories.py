"""Gradients that a backward pass made with a history (``create_graph=True``).

The store of gradients keeps values alone. What is computed from such a gradient looks as in memory,
and can be used for anything but to differentiate it: there a backward pass would leave out, without
a word, all that the gradient depends on, so it is refused by name.

A mark of one element stands for the gradient in its graph: what asks for derivatives by anything
that the gradient depends on comes to it. A list of marks is what a tensor in memory has as its
history: all that stand for one tensor share it, and what was detached has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from infinity.parameters.offloaded.modes import unseen


@dataclass(slots=True, eq=False)
class ChangeCount:
    """How often the values of a gradient changed, until it was cleared or replaced."""

    changes: int = 0
    marks: list[torch.Tensor] = field(default_factory=list)
    """Of what it depends on."""
    moves: int = 0
    """How often a program gave it other memory, by ``data``."""


@dataclass(frozen=True, slots=True)
class Source:
    """The gradient of the parameter ``name`` as it was after ``seen`` changes."""

    name: str
    counts: Sequence[ChangeCount] = ()
    seen: int = 0
    moves: int = 0

    @staticmethod
    def of(name: str, counts: Sequence[ChangeCount]) -> Source:
        return Source(name, counts, _total(counts), _moves(counts))

    @property
    def has_moved(self) -> bool:
        return _moves(self.counts) != self.moves

    def check(self) -> None:
        """Raises ``RuntimeError`` where the values have changed since, and a view in memory would
        show those that they are now.
        """
        if _total(self.counts) != self.seen:
            raise RuntimeError(
                f"this view of the gradient of {self.name}, which is offloaded, was taken before "
                "the gradient changed (by another backward pass, clipping, or in place), and has "
                "the values from before; take it anew, or clone() what is to be kept"
            )

    def check_followed(self) -> None:
        """Raises ``RuntimeError`` where the gradient has other memory by now, and what was detached
        of it would have that from before.
        """
        if self.has_moved:
            raise RuntimeError(
                f"this was detached of the gradient of {self.name}, which is offloaded, before "
                "that was given other data; take it anew, or clone() what is to be kept"
            )


def _total(counts: Sequence[ChangeCount]) -> int:
    return sum(count.changes for count in counts)


def _moves(counts: Sequence[ChangeCount]) -> int:
    return sum(count.moves for count in counts)


@unseen
def history_of(gradient: torch.Tensor) -> torch.Tensor:
    """A mark with the history of ``gradient``, and none of its memory."""
    with torch.enable_grad():
        mark: torch.Tensor = _Mark.apply(gradient)  # type: ignore[no-untyped-call]
    return mark


def marks_of(operands: Any) -> tuple[torch.Tensor, ...]:
    """Marks of what a gradient that these are brought into in place depends on from then on."""
    if not torch.is_grad_enabled():
        return ()
    tensors = (leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor))
    return tuple(history_of(tensor) for tensor in tensors if tensor.requires_grad)


@unseen
def with_histories(values: torch.Tensor, marks: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """``values``, of the gradient of the parameter ``name``, that cannot be differentiated but seem
    so, where operations have a history.
    """
    if not marks or not torch.is_grad_enabled():
        return values
    behind: torch.Tensor = _Behind.apply(  # type: ignore[no-untyped-call]
        lambda: values, name, *marks
    )
    return behind


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=gradient.device)

    @staticmethod
    def backward(ctx: Any, _: Any) -> None:
        """Never reached: ``_Behind`` is nearer to what is differentiated."""


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, give: Callable[[], torch.Tensor], name: str, *marks: torch.Tensor
    ) -> torch.Tensor:
        ctx.name = name
        return give()  # not an input, which torch would take the result for a view of

    @staticmethod
    def backward(ctx: Any, _: Any) -> None:
        raise RuntimeError(
            f"the gradient of {ctx.name}, which is offloaded, cannot be differentiated: "
            "backward(create_graph=True) leaves values alone in grad; take gradients with a "
            "history by torch.autograd.grad(loss, parameters, create_graph=True), or detach() what "
            "is to be a constant"
        )
