"""Ctrl-C wherever Python looks for it: what torch does for the thread afterwards is as before.

The error is kept, as a notebook keeps the last one: so no generator that it came through is closed.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import infinity
from infinity.parameters.offloaded.modes import outside_inference
from infinity.parameters.offloaded.placeholders import as_they_are
from tests.support.interrupts import PACKAGES, interrupt, interrupt_at_call, sampled
from tests.support.training import least_budget

WIDTH = 64
POINTS = 6
WHERE = (*PACKAGES, contextlib.__file__)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def of_the_thread() -> tuple[Any, ...]:
    """Modes that the program, and nobody else, may set."""
    keys = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
        keys,
        torch._C._is_torch_function_enabled(),
    )


def gather(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
    with offloaded.gathered():
        pass


ACTIONS: dict[str, Callable[[nn.Module, infinity.OffloadedModel], object]] = {
    "gradients": lambda model, _: [p.grad.sum() for p in model.parameters() if p.grad is not None],
    "norms": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "values": lambda model, _: [p.detach().norm() for p in model.parameters()],
    "operations": lambda model, _: [(p * 2).sum() for p in model.parameters()],
    "forward": lambda model, _: model(torch.ones(2, WIDTH)),
    "gathered": gather,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("budget", ["least", "64MiB"])
@pytest.mark.parametrize("points", [POINTS, pytest.param(60, marks=pytest.mark.proof)])
def test_modes_of_the_program_come_back(
    action: str, budget: str, points: int, tmp_path: Path
) -> None:
    host_memory = least_budget(make, tmp_path) if budget == "least" else budget
    model = make()
    with infinity.offload(model, tmp_path, host_memory=host_memory) as offloaded:
        model(torch.ones(2, WIDTH)).square().sum().backward()

        def act() -> object:
            return ACTIONS[action](model, offloaded)

        act()
        kept = []  # as a notebook keeps the last error
        before = of_the_thread()
        total = interrupt_at_call(act, None, WHERE).seen
        for number in sampled(total, points):
            came = interrupt_at_call(act, number, WHERE)
            kept.append(came.error)
            assert of_the_thread() == before, came.line
        del kept[:]
        assert of_the_thread() == before


@pytest.mark.parametrize("points", [POINTS, pytest.param(200, marks=pytest.mark.proof)])
def test_modes_come_back_wherever_weights_are_lent(points: int, tmp_path: Path) -> None:
    """Also where the frames that an interrupt came through, and what they hold, go later."""
    model = make()
    with infinity.offload(model, tmp_path, host_memory="64MiB") as offloaded:

        def lend() -> None:
            with offloaded.gathered(modify=True), torch.no_grad():
                pass

        lend()
        before = of_the_thread()
        total = interrupt(lend, None).seen
        for number in sampled(total, points):
            came = interrupt(lend, number)
            assert of_the_thread() == before, came.line


@pytest.mark.parametrize("guard", [outside_inference, as_they_are], ids=["inference", "dispatch"])
def test_what_sets_modes_is_made_by_no_function_in_python(guard: object) -> None:
    """It sets back what it found as it was made: a frame that keeps it does so later."""
    assert isinstance(guard, partial)
    assert type(guard()).__module__ == "torch._C"
