"""The undisturbed run: everything in memory, with nothing of the library but its arithmetic.

A plain model, plain autograd, masters in float32 beside weights of 16 bits, updated one after the
other. A task with tiles is what a library with room for all of it makes of it, for sums over tiles
have an order of their own (docs/TUNING.md, "Tiles").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import infinity
from infinity.optim.adamw import AdamRule
from soaking.models import DTYPES, FACTORIES, LR, STATE_DTYPES, digest_of, factor, make
from soaking.programs import Task
from soaking.training import SEED, after, fill_row, passes
from swap.kernels import merge_master, split_master, sum_of_squares
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate
from tests.support.training import nearest


class Masters:
    """What an optimizer of PyTorch updates, in float32 beside the weights of `model`."""

    def __init__(self, task: Task, parameters: list[nn.Parameter], first: list[torch.Tensor]):
        self._parameters = parameters
        self.masters = [nn.Parameter(value.clone()) for value in first]
        trained = [m for m, p in zip(self.masters, parameters, strict=True) if p.requires_grad]
        self.optimizer = FACTORIES[task.optimizer](trained)
        self.groups: list[dict[str, Any]] = self.optimizer.param_groups
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._round(index)

    def update(self, gradients: list[torch.Tensor | None], scale: float) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype) * scale
        self.optimizer.step()
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._round(index)

    def values(self, index: int) -> torch.Tensor:
        return self.masters[index].detach()

    def set(self, index: int, changed: torch.Tensor) -> None:
        """Elements that were changed are the master."""
        weight = self._parameters[index].detach()
        with torch.no_grad():
            self.masters[index][changed] = weight[changed].float()

    def _round(self, index: int) -> None:
        parameter = self._parameters[index]
        parameter.data = nearest(self.masters[index].detach(), parameter.dtype)


class Components:
    """What the native kernel updates: weights, what they lack of the masters, and moments."""

    def __init__(self, task: Task, parameters: list[nn.Parameter], first: list[torch.Tensor]):
        state_dtype = STATE_DTYPES[task.optimizer]
        self._parameters, self._rule = parameters, AdamRule(state_dtype=state_dtype)
        self.groups = [infinity.AdamW(lr=LR, state_dtype=state_dtype).defaults()]
        self._steps = [0] * len(parameters)
        self._of = [self._made(*pair) for pair in zip(parameters, first, strict=True)]

    def _made(self, parameter: nn.Parameter, first: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = parameter.detach().view(-1)
        found = {"weight": weight}
        for component in self._rule.components(parameter.dtype):
            count = component.count(weight.numel())
            found[component.name] = torch.zeros(count, dtype=component.dtype)
        if "lo" in found and parameter.requires_grad:
            split_master(first.reshape(-1), weight, found["lo"])
        return found

    def update(self, gradients: list[torch.Tensor | None], scale: float) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._steps[index] += 1
            segment = Segment(
                parameter=index, subgroup=0, start=0, length=gradient.numel(), offset=0
            )
            shape = self._parameters[index].shape
            update = ParameterUpdate(
                parameter=index, step=self._steps[index], shape=shape, options=self.groups[0]
            )
            self._rule.apply(segment, update, self._of[index], gradient.reshape(-1), scale)

    def values(self, index: int) -> torch.Tensor:
        found, shape = self._of[index], self._parameters[index].shape
        if "lo" not in found:
            return found["weight"].view(shape)
        master = torch.empty(found["weight"].numel())
        merge_master(found["weight"], found["lo"], master)
        return master.view(shape)

    def set(self, index: int, changed: torch.Tensor) -> None:
        if "lo" in self._of[index]:
            self._of[index]["lo"][changed.view(-1)] = 0


class InMemory:
    """A trainee with everything in memory."""

    def __init__(self, task: Task) -> None:
        self._task, self._taken = task, 0
        self.model = make(task)
        first = [parameter.detach().clone() for parameter in self.model.parameters()]
        if (dtype := DTYPES[task.dtype]) is not None:
            self.model.to(dtype)
        self._parameters = [*self.model.parameters()]
        kind: type[Components | Masters] = Components if task.optimizer in STATE_DTYPES else Masters
        self._state = kind(task, self._parameters, first)
        self._clip = 1.0

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clear(self) -> None:
        self.model.zero_grad()
        self._clip = 1.0

    def _norm(self) -> float:
        gradients = (p.grad for p in self._parameters if p.grad is not None)
        return math.sqrt(sum(sum_of_squares(g.reshape(-1)) for g in gradients)) * self._clip

    def clip(self, max_norm: float) -> None:
        self._clip *= min(1.0, max_norm / (self._norm() + 1e-6))

    def step(self) -> None:
        scale, bound = self._clip, self._task.max_grad_norm
        if bound is not None:
            scale *= min(1.0, bound / (self._norm() + 1e-6))
        self._state.update([parameter.grad for parameter in self._parameters], scale)
        self.clear()

    def schedule(self) -> None:
        self._taken += 1
        for group in self._state.groups:
            group["lr"] = LR * factor(self._taken)

    def change_row(self, parameter: nn.Parameter) -> None:
        before = parameter.detach().clone()
        fill_row(parameter)
        changed = before != parameter.detach()
        (index,) = (i for i, one in enumerate(self._parameters) if one is parameter)
        self._state.set(index, changed)

    def masters(self) -> str:
        """The digest of the model as it comes out of a block, in float32."""
        self.model.float()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.data = self._state.values(index).clone()
        return digest_of(self.model)


def train_in_memory(task: Task) -> dict[str, Any]:
    """What is seen of each step, weights before each and behind all, values at the end."""
    trainee = InMemory(task)
    torch.manual_seed(SEED)
    seen, weights = [], [digest_of(trainee.model)]
    for number in range(len(task.steps)):
        seen.append(passes(trainee, task, number))
        trainee.step()
        trainee.schedule()
        after(trainee, task, number)
        weights.append(digest_of(trainee.model))
    return {"seen": seen, "weights": weights, "values": trainee.masters()}
