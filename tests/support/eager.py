"""Training with everything in memory, and nothing of the library but its arithmetic.

A plain model, plain autograd, whole tensors, one update after the other: what training under any
budget has to equal, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from infinity.optim.adamw import AdamRule
from swap.kernels import merge_master, split_master, sum_of_squares
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate
from tests.support.models import seeded
from tests.support.training import LossOf, Make, Outcome, values_of


class Eager:
    """A model in ``dtype`` (None: as it is) with its masters and moments beside it."""

    def __init__(
        self,
        make: Make,
        *,
        dtype: torch.dtype | None,
        rule: AdamRule,
        options: dict[str, Any],
        max_grad_norm: float | None,
    ) -> None:
        model = seeded(make)
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.model = model if dtype is None else model.to(dtype)
        self._rule = rule
        self._options = options
        self._max_grad_norm = max_grad_norm
        self._steps = [0 for _ in masters]
        self._components = [
            self._components_of(parameter, master)
            for parameter, master in zip(self.model.parameters(), masters, strict=True)
        ]

    def step(self) -> float:
        """Clip, update, clear; returns the norm before clipping."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        norm = math.sqrt(sum(sum_of_squares(g.reshape(-1)) for g in gradients if g is not None))
        scale = 1.0
        if self._max_grad_norm is not None:
            scale = min(1.0, self._max_grad_norm / (norm + 1e-6))
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._update(index, parameters[index], gradient.reshape(-1), scale)
        self.model.zero_grad()
        return norm

    def values(self) -> dict[str, torch.Tensor]:
        """The parameters in all the precision that there is: copies of the masters."""
        values = values_of(self.model)
        for (name, parameter), components in zip(
            self.model.named_parameters(), self._components, strict=True
        ):
            if "lo" in components:
                master = torch.empty(parameter.numel())
                merge_master(components["weight"], components["lo"], master)
                values[name] = master.view(parameter.shape)
        return values

    def _update(
        self, index: int, parameter: nn.Parameter, gradient: torch.Tensor, scale: float
    ) -> None:
        numel = gradient.numel()
        self._steps[index] += 1
        segment = Segment(parameter=index, subgroup=0, start=0, length=numel, offset=0)
        update = ParameterUpdate(
            parameter=index, step=self._steps[index], shape=parameter.shape, options=self._options
        )
        self._rule.apply(segment, update, self._components[index], gradient, scale)

    def _components_of(
        self, parameter: nn.Parameter, master: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        weight = parameter.detach().reshape(-1)
        components = {"weight": weight}
        for component in self._rule.components(parameter.dtype):
            components[component.name] = torch.zeros(
                component.count(weight.numel()), dtype=component.dtype
            )
        if "lo" in components:
            split_master(master.reshape(-1), weight, components["lo"])
        assert weight.data_ptr() == parameter.data_ptr()
        return components


def train_eagerly(
    make: Make,
    loss_of: LossOf,
    *,
    steps: int,
    accumulate: int = 1,
    dtype: torch.dtype | None = None,
    rule: AdamRule,
    options: dict[str, Any],
    max_grad_norm: float | None = None,
) -> Outcome:
    """As ``tests.support.training.train``, by an ``Eager``."""
    eager = Eager(make, dtype=dtype, rule=rule, options=options, max_grad_norm=max_grad_norm)
    losses, norms = [], []
    torch.manual_seed(11)
    for step in range(steps):
        for part in range(accumulate):
            loss = loss_of(eager.model, step * accumulate + part)
            (loss / accumulate).backward()
            losses.append(loss.item())
        norms.append(torch.tensor(eager.step()).item())
    return Outcome(tuple(losses), tuple(norms), eager.values(), 0)
