"""What a factory does to the optimizer that it makes: hooks on it, and a step of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, same_bits, values_of

Factory = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def _sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _train_plain(factory: Factory) -> dict[str, torch.Tensor]:
    model = seeded(Stack)
    optimizer = factory([*model.parameters()])
    for step in range(3):
        vector_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def _train_offloaded(factory: Factory, nvme: Path) -> dict[str, torch.Tensor]:
    model = seeded(Stack)
    with infinity.offload(model, nvme, optimizer=factory, host_memory=WHOLE) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
    return values_of(model)


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert all(same_bits(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_of_a_factory_are_called_as_in_memory(when: str, nvme: Path) -> None:
    calls = []

    def halve_lr(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(optimizer)
        for group in optimizer.param_groups:
            group["lr"] /= 2

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = _sgd(parameters)
        register = getattr(optimizer, f"register_step_{when}_hook")
        register(halve_lr)
        register(lambda *_: pytest.fail("it was removed")).remove()
        return optimizer

    expected = _train_plain(make)
    assert len(calls) == 3
    _assert_same(_train_offloaded(make, nvme), expected)
    assert len(calls) == 6


def test_step_hooks_of_a_factory_are_not_called_for_each_parameter(nvme: Path) -> None:
    class Sgd(torch.optim.SGD):
        """Its step calls that of another class, which calls hooks as well."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    _sgd([torch.zeros(1)])
    calls = []

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = Sgd(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        return optimizer

    _train_offloaded(make, nvme)
    assert len(calls) == 3


def test_a_step_hook_of_a_factory_that_changes_weights_is_refused(nvme: Path) -> None:
    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = _sgd(parameters)

        @torch.no_grad()
        def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.9)

        optimizer.register_step_pre_hook(decay)
        return optimizer

    with pytest.raises(RuntimeError, match="changed in place"):
        _train_offloaded(make, nvme)


def test_a_step_set_on_the_object_is_refused_by_name(nvme: Path) -> None:
    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer: Any = _sgd(parameters)
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)
        return optimizer

    with pytest.raises(ValueError, match=r"SGD has a step that was set on it.*subclass"):
        _train_offloaded(make, nvme)


def test_a_scheduler_made_by_the_factory_is_no_step_of_its_own(nvme: Path) -> None:
    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = _sgd(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    _assert_same(_train_offloaded(make, nvme), _train_plain(make))


def test_a_step_that_says_it_wraps_that_of_its_base_is_taken_itself(nvme: Path) -> None:
    _sgd([torch.zeros(1)])  # from now on the step of SGD says that it calls hooks

    class Decaying(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.mul_(0.9)
            return super().step(closure)

    def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return Decaying(parameters, lr=0.1)

    _assert_same(_train_offloaded(make, nvme), _train_plain(make))
