"""What a step of a task does, to a model in memory and to one that is offloaded alike."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from soaking.models import digest, loss_of
from soaking.programs import Step, Task

SEED = 11
"""Of torch's generator, as training begins."""


class Trainee(Protocol):
    """A model in training."""

    @property
    def model(self) -> nn.Module: ...
    def backward(self, loss: torch.Tensor) -> None: ...
    def clear(self) -> None: ...
    def clip(self, max_norm: float) -> None: ...
    def step(self) -> None: ...
    def schedule(self) -> None: ...
    def change_row(self, parameter: nn.Parameter) -> None: ...


class RaisedError(Exception):
    """What a layer raises that is to."""


def passes(trainee: Trainee, task: Task, number: int) -> list[str]:
    """All of step `number` before the optimizer's: what was seen of it."""
    step = task.steps[number]
    seen = _evaluated(trainee, number) if step.evaluates else []
    if step.fails:
        _fail(trainee, step, number)
    for part in range(step.accumulate):
        loss = loss_of(trainee.model, 4 * number + part)
        seen.append(digest(loss))
        trainee.backward(loss / step.accumulate)
    if step.clips is not None:
        trainee.clip(step.clips)
    return seen


def after(trainee: Trainee, task: Task, number: int) -> None:
    """All of step `number` behind the optimizer's. Can be done again where it was stopped."""
    row_of = task.steps[number].changes_row
    if row_of is not None:
        parameters = [p for p in layers_of(trainee.model)[row_of].parameters() if p.dim()]
        if parameters:
            trainee.change_row(parameters[0])


def _evaluated(trainee: Trainee, number: int) -> list[str]:
    trainee.model.eval()
    try:
        with torch.no_grad():
            return [digest(loss_of(trainee.model, 500 + number))]
    finally:
        trainee.model.train()


def _fail(trainee: Trainee, step: Step, number: int) -> None:
    """A pass that ends with an exception from within."""

    def raise_it(*_: object) -> None:
        raise RaisedError

    def raise_behind(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(raise_it)

    layer = layers_of(trainee.model)[len(layers_of(trainee.model)) // 2]
    handle = layer.register_forward_hook(raise_it if step.fails == "forward" else raise_behind)
    try:
        with suppress(RaisedError):
            trainee.backward(loss_of(trainee.model, 4 * number))
    finally:
        handle.remove()
    trainee.clear()


def layers_of(model: nn.Module) -> nn.ModuleList:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def fill_row(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter[0].fill_(0.015625)
