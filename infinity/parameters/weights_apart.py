"""Memory that two parameters in memory share, or a parameter and a gradient: refused.

torch updates parameters one after the other, each whole, so that one sees what became of the one
before it. ``OffloadedAdamW`` updates them piece by piece, in an order that goes by where their
state is, and some while others are on their way to and from a device: what came out would depend on
the budget.

A gradient may be the weights of its own parameter, and gradients may share what they like: each
element is read before it is written, and gradients are never written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from swap.plain import has_bytes, is_same_view, reach_bytes, share_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """``tensor``, which lies in bytes [start, end) with gaps maybe."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor


def check_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ``ValueError`` naming two of these local tensors of parameters that share memory."""
    for spans in _by_device(named):
        _check_apart(spans)


def check_updates(updates: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Raises ``ValueError`` naming a parameter whose weights are in memory of another one, or of a
    gradient. ``updates`` are name, weights, flat, and gradient of each.
    """
    weights = _by_device((name, weight) for name, weight, _ in updates)
    for spans in weights:
        _check_apart(spans)
    on = {spans[0].tensor.device: spans for spans in weights}
    for name, weight, gradient in updates:
        if has_bytes(gradient):
            _check_gradient(name, weight, gradient, on.get(gradient.device, []))


def _by_device(named: Iterable[tuple[str, torch.Tensor]]) -> list[list[_Span]]:
    """In the order of their addresses, none without memory."""
    spans: dict[torch.device, list[_Span]] = {}
    for name, tensor in named:
        if has_bytes(tensor):
            start = tensor.data_ptr()
            span = _Span(start, start + reach_bytes(tensor), name, tensor)
            spans.setdefault(tensor.device, []).append(span)
    return [sorted(some, key=lambda span: span.start) for some in spans.values()]


def _check_apart(spans: Sequence[_Span]) -> None:
    """Weights have no gaps: those that have some are refused for that, elsewhere."""
    for first, second in pairwise(spans):
        if second.start < first.end and share_bytes(first.tensor, second.tensor):
            raise ValueError(
                f"{first.name} and {second.name} are different parameters over the same memory, "
                "of which each would undo what the other learns; give the optimizer one of them "
                "(tied weights are one Parameter in both modules), or make one a clone"
            )


def _check_gradient(
    name: str, weight: torch.Tensor, gradient: torch.Tensor, weights: Sequence[_Span]
) -> None:
    """``weights`` have no bytes in common, so they end in the order in which they begin."""
    start = gradient.data_ptr()
    first = bisect_right(weights, start, key=lambda span: span.end)
    last = bisect_left(weights, start + reach_bytes(gradient), key=lambda span: span.start)
    for span in weights[first:last]:
        is_own = span.tensor is weight
        if is_own and gradient.is_contiguous() and is_same_view(gradient.view(-1), span.tensor):
            continue
        if share_bytes(span.tensor, gradient):
            raise ValueError(
                f"the gradient of {name} shares memory with the weights of "
                f"{span.name}, which the step changes; make the gradient a clone"
            )
