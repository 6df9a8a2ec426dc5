"""Steps that are not like the one before: right to the bit, and foreseen again when they return.

Each model is trained through a script of steps, offloaded with the least memory that works, and as
a plain loop in memory. In the middle of the script the pattern of uses departs from what it was;
the last steps have one pattern again, and by the end of them every use must have been expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.adamw import AdamRule
from tests.support.eager import Eager
from tests.support.models import Gpt, Routed, Stack, seeded, token_loss, tokens, vector_loss
from tests.support.proof import matrix
from tests.support.training import least_budget, same_bits

ADAM = infinity.AdamW(lr=3e-3)
STEADY = 5
"""Steps of one pattern at the end: two that depart in a row make a new plan, the rest follows."""

Pass = Callable[[nn.Module, int], torch.Tensor | None]
"""What a step does before it is taken: a loss to go backwards from, or None."""


class Branching(nn.Module):
    """Two branches of which an input chooses, a loop over one shared layer, and one used late."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.left = Stack(width, depth=4)
        self.right = Stack(width, depth=4)
        self.shared = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.goes_left = True
        self.rounds = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        x = (self.left if self.goes_left else self.right)(x)
        for _ in range(self.rounds):
            x = x + torch.tanh(self.shared(x))
        result: torch.Tensor = self.last(x)
        return result


def _branch(model: nn.Module, step: int, *, left: bool, rounds: int) -> torch.Tensor:
    assert isinstance(model, Branching)
    model.goes_left, model.rounds = left, rounds
    return vector_loss(model, step)


def _generate(model: nn.Module, step: int) -> None:
    """Eight tokens, one after the other, each from all before it."""
    model.eval()
    row = tokens(step)[:1, :4]
    with torch.no_grad():
        for _ in range(8):
            row = torch.cat([row, model(row)[:, -1:].argmax(-1)], 1)
    model.train()


def _evaluate_part(model: nn.Module, step: int) -> None:
    """Two blocks of the model by themselves, in another order than it has them."""
    assert isinstance(model, Gpt)
    with torch.inference_mode():
        model.blocks[2](model.blocks[1](torch.ones(1, 3, 128)))


_LEFT = partial(_branch, left=True, rounds=2)
_RIGHT = partial(_branch, left=False, rounds=2)
_LONG = partial(_branch, left=True, rounds=5)
_NO_ROUND = partial(_branch, left=False, rounds=0)
_ROUTED = partial(vector_loss, width=144)


class Mixture(nn.Module):
    """A ``Routed`` whose inputs can be made to go to the first two experts of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed()
        self.is_settled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_settled:
            result: torch.Tensor = self.routed(x)
            return result
        for router, experts in zip(self.routed.routers, self.routed.experts, strict=True):
            assert isinstance(experts, nn.ModuleList)
            first, second = router(x.mean(0))[:2].softmax(0)
            x = x + torch.tanh(first * experts[0](x) + second * experts[1](x))
        return x


def _settled(model: nn.Module, step: int) -> torch.Tensor:
    assert isinstance(model, Mixture)
    model.is_settled = True
    return _ROUTED(model, step)


@dataclass(frozen=True)
class Script:
    """A model, and for each step what is done before it is taken."""

    make: Callable[[], nn.Module]
    steps: Sequence[Sequence[Pass]]
    dtype: torch.dtype | None = None
    is_foreseen_in_the_end: bool = True


SCRIPTS = {
    "branches": Script(
        Branching,
        [*[[_LEFT]] * 3, [_RIGHT], [_LEFT], [_RIGHT], [_RIGHT], *[[_LEFT]] * STEADY],
    ),
    "branches within a step": Script(
        Branching, [*[[_LEFT, _RIGHT]] * 3, [_RIGHT, _LEFT], *[[_LEFT, _RIGHT]] * STEADY]
    ),
    "loops": Script(
        Branching, [*[[_LEFT]] * 3, [_LONG], [_NO_ROUND], [_LONG], *[[_LEFT]] * STEADY]
    ),
    "routes that change": Script(Routed, [[_ROUTED]] * 8, is_foreseen_in_the_end=False),
    "routes that settle": Script(Mixture, [*[[_ROUTED]] * 4, *[[_settled]] * STEADY]),
    "generation between steps": Script(
        Gpt,
        [*[[token_loss]] * 3, [_generate, token_loss], *[[token_loss]] * STEADY],
        dtype=torch.bfloat16,
    ),
    "generation before every step": Script(
        Gpt, [[token_loss], *[[_generate, token_loss]] * STEADY]
    ),
    "generation within accumulation": Script(
        Gpt, [[token_loss], [token_loss, _generate, token_loss], *[[token_loss]] * STEADY]
    ),
    "parts by themselves": Script(
        Gpt, [*[[token_loss]] * 2, [_evaluate_part, token_loss], *[[token_loss]] * STEADY]
    ),
}


def _passes(model: nn.Module, passes: Sequence[Pass], step: int) -> list[float]:
    losses = []
    for number, one in enumerate(passes):
        loss = one(model, 10 * step + number)
        if loss is not None:
            loss.backward()
            losses.append(loss.item())
    return losses


def _offloaded(script: Script, nvme: Path, dtype: torch.dtype | None, losses: list[float]) -> Any:
    """Train by the script; returns values, and (expected, unexpected) uses of the last step."""
    options: dict[str, Any] = {"compute_dtype": dtype, "optimizer": ADAM}
    least = least_budget(script.make, nvme, **options)
    model = seeded(script.make)
    with infinity.offload(model, nvme, host_memory=least, **options) as offloaded:
        before = after = offloaded.report()
        for step, passes in enumerate(script.steps):
            before = offloaded.report()
            losses += _passes(model, passes, step)
            after = offloaded.report()
            offloaded.step()
        length = len(offloaded._training.state.weights.schedule.plan)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = after.expected_uses - before.expected_uses
    unexpected = after.unexpected_uses - before.unexpected_uses
    return values, (expected, unexpected, length), after.unexpected_uses


USUAL = {"branches", "routes that change", "routes that settle"}


@pytest.mark.parametrize("name", matrix(SCRIPTS, usual=USUAL))
def test_a_step_unlike_the_last_is_right_and_one_like_it_foreseen(name: str, nvme: Path) -> None:
    script = SCRIPTS[name]
    dtype = script.dtype
    found: list[float] = []
    values, (expected_uses, unexpected_uses, length), departures = _offloaded(
        script, nvme, dtype, found
    )
    eager = Eager(
        script.make, dtype=dtype, rule=AdamRule(), options=ADAM.defaults(), max_grad_norm=None
    )
    expected: list[float] = []
    for step, passes in enumerate(script.steps):
        expected += _passes(eager.model, passes, step)
        eager.step()
    assert found == expected
    for key, value in eager.values().items():
        assert same_bits(value, values[key]), key
    assert departures > 0, "the script never departs from the plan"
    if script.is_foreseen_in_the_end:
        assert unexpected_uses == 0
        assert expected_uses == length
