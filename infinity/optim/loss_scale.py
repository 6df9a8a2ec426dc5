"""Dynamic loss scaling for float16 gradients, and what scale gradients were really given.

`offloaded.backward(loss)` scales; `loss.backward()` does not, and its gradients are taken as they
are, so that they train as in plain PyTorch. Gradients of both kinds that accumulate have the scale
of the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Halved when a gradient overflowed (that step is skipped), doubled after ``growth_interval``
    good steps.

    The scale is a power of two, so scaling and unscaling are exact. Follows Micikevicius et al.,
    arXiv 1710.03740.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0

    def saved(self) -> list[Any]:
        """What ``restore`` takes."""
        return [self.value, self.good_steps]

    def restore(self, saved: Sequence[Any] | None) -> None:
        """Be as ``saved``, value and good steps, or as new where none was."""
        fresh = type(self)()
        self.value, self.good_steps = saved or (fresh.value, fresh.good_steps)

    def count(self, *, is_skipped: bool) -> None:
        """Take note of a step that was taken, or of one that was skipped for an overflow."""
        if is_skipped:
            self.value = max(1.0, self.value / 2)
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= 2
            self.good_steps = 0


@dataclass(slots=True)
class GradientScale:
    """What the accumulated gradients are multiplied by. ``loss_scale``: None where none is wanted.

    ``is_dynamic`` says whether they have the loss scale, and an overflow may come of that.
    """

    loss_scale: LossScale | None
    is_dynamic: bool = False
    _accumulated: float | None = None
    _passing: float | None = None

    @property
    def value(self) -> float:
        return 1.0 if self._accumulated is None else self._accumulated

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of the loss, scaled as the gradients are that there are already, or by the loss
        scale if there are none.
        """
        if self.loss_scale is None:
            loss.backward()
            return
        is_first = self._accumulated is None
        self._passing = self.loss_scale.value if is_first else self.value
        try:
            (loss * self._passing).backward()
        finally:
            self._passing = None

    def taken(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that arrives, dense, at the scale of those that it is added to. An overflow by
        that shows in their norm.
        """
        gradient = _dense(gradient)
        if self.loss_scale is None:
            return gradient
        if self._accumulated is None:
            self.is_dynamic = self._passing is not None
            self._accumulated = 1.0 if self._passing is None else self._passing
        arrived = 1.0 if self._passing is None else self._passing
        return gradient if arrived == self.value else gradient * (self.value / arrived)

    def assigned(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that a program sets, dense: at the scale that it would be read with."""
        if self._accumulated is None:
            self._accumulated = 1.0
        return _dense(gradient)

    def overflows(self, norm: float) -> bool:
        """Whether a step with that norm is to be skipped. Takes no note of it."""
        return self.loss_scale is not None and self.is_dynamic and not math.isfinite(norm)

    def count_step(self, *, is_skipped: bool) -> None:
        """A step with these gradients is taken, or skipped, which adapts the loss scale."""
        if self.loss_scale is not None and self.is_dynamic:
            self.loss_scale.count(is_skipped=is_skipped)

    def clear(self) -> None:
        """There are no gradients any more."""
        self._accumulated, self.is_dynamic = None, False


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
