"""Small optimizers that keep state in their groups or couple parameters, as some beside PyTorch's
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def moments(
        self, group: dict[str, Any]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Parameters that have a gradient, with that and an average of it."""
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                yield parameter, parameter.grad, average.lerp_(parameter.grad, 0.1)


class CountsInGroup(_Optimizer):
    """Corrects the bias of averages by a count that the group has, as apex's FusedAdam."""

    def update_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        for parameter, _, average in self.moments(group):
            parameter.sub_(average, alpha=group["lr"] / (1 - 0.9 ** group["step"]))


class WeighsInGroup(_Optimizer):
    """Sums up the weights of an average in the group, as schedule-free optimizers."""

    def update_group(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        weight = group["lr"] ** 2 * group["k"]
        group["weight_sum"] = group.get("weight_sum", 0.0) + weight
        for parameter, gradient, average in self.moments(group):
            parameter.sub_(average.lerp(gradient, weight / group["weight_sum"]), alpha=group["lr"])


class TrustRatio(_Optimizer):
    """A rate for each parameter by its norm, after clipping by a norm over all, as timm's Lamb."""

    def __init__(self, params: Any, lr: float = 1e-2, most: float | None = None) -> None:
        super().__init__(params, lr, most=most)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        every = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = torch.stack([gradient.norm() for gradient in every]).norm() if every else None
        super().step(closure)

    def update_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        clip = 1.0
        if group["most"] is not None and self.norm is not None:
            clip = float((group["most"] / self.norm).clamp(max=1.0))
        for parameter, gradient, average in self.moments(group):
            ratio = float(parameter.norm() / (gradient.norm() + 1e-6)) * clip / group["step"]
            parameter.sub_(average, alpha=group["lr"] * ratio)


class EstimatesRate(_Optimizer):
    """Estimates its rate from all parameters of a group, as Prodigy."""

    def update_group(self, group: dict[str, Any]) -> None:
        found = [*self.moments(group)]
        total = sum(float((gradient * average).sum()) for _, gradient, average in found)
        group["d"] = max(group.get("d", 1e-3), abs(group.get("d_numerator", 0.0)))
        group["d_numerator"] = 0.9 * group.get("d_numerator", 0.0) + 1e-3 * total
        for parameter, _, average in found:
            parameter.sub_(average, alpha=group["lr"] * group["d"])


class CountsInItself(_Optimizer):
    """Keeps its count of steps as an attribute."""

    steps = 0

    def update_group(self, group: dict[str, Any]) -> None:
        self.steps += 1
        for parameter, _, average in self.moments(group):
            parameter.sub_(average, alpha=group["lr"] / (1 - 0.9**self.steps))


class LooksAhead(torch.optim.Optimizer):
    """Has an optimizer of its own for the same parameters, as Lookahead."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=1e-2)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()


class NeedsClosure(_Optimizer):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class ScheduleFree(WeighsInGroup):
    def train(self) -> None:
        """Weights as they are trained."""

    def eval(self) -> None:
        """Weights as they are used."""
