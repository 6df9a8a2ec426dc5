"""A run that is interrupted at a chosen line of one of the things it does, and then goes on.

What each leaves is compared with an undisturbed run: values are as before or as after it, what
comes next has the same bits, and memory, files and descriptors are those that were there before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity import OffloadedModel
from tests.support.interrupts import Lines, Remains, at_rest, interrupt
from tests.support.tiers import Leftovers
from tests.support.training import WHOLE, least_budget, same_bits, values_of

WIDTH = 130
BATCH = 512
"""So that what autograd saves is large enough to be taken by ``activations=``."""
ACTIVATION_BYTES = 700_000
"""Less than one forward pass saves."""
WARM_UP = 3
"""Steps after which updates begin during the backward pass."""

Values = dict[str, torch.Tensor]
How = Callable[[Callable[[], object], int | None], Lines]
"""Runs an action and interrupts it at one of its points: see ``interrupts``."""
Found = tuple[Lines, str]


class Layer(nn.Module):
    """Reaches for the weights of an inner module, beside calling one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(torch.tanh(self.inner(x)), self.out.weight, self.out.bias)


@dataclass(frozen=True, slots=True)
class Scenario:
    """How a model is offloaded, and how large it is. Only a wide one is on NVMe at the least."""

    activations: str
    is_least: bool
    width: int = WIDTH
    depth: int = 4

    def make(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Layer(self.width) for _ in range(self.depth)])

    def loss(self, model: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(BATCH, self.width)).square().mean()
        return loss

    def __str__(self) -> str:
        return f"{self.activations}, {'least' if self.is_least else 'ample'}"


@dataclass(frozen=True, slots=True)
class Moment:
    """Values of the model after a number of steps."""

    steps: int
    values: Values


class Run:
    """A model in an offload block, which goes back to the same point of its training before each
    interrupt.
    """

    def __init__(
        self, scenario: Scenario, model: nn.Module, offloaded: OffloadedModel, folder: Path
    ) -> None:
        self.scenario = scenario
        self.model = model
        self.offloaded = offloaded
        self.folder = folder
        self.loss: torch.Tensor | None = None
        activations: Any = offloaded._training.activations
        if scenario.activations != "keep":
            activations.budget_bytes = ACTIVATION_BYTES
        self.activations = activations
        for _ in range(WARM_UP):
            self.train()
        self.start = self.saved("start")
        self.train()
        self.next = self.saved("next")
        self.train()
        self.later = self.now()
        self.snapshot()  # from the first on folders are held until the end
        self.drop()
        self.go_back()
        self.train()
        self.remains = self._remains()

    # What a run does.

    def forward(self) -> None:
        self.loss = self.scenario.loss(self.model)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def step(self) -> None:
        self.offloaded.step()

    def flush(self) -> None:
        self.offloaded.flush()

    def train(self) -> None:
        self.forward()
        self.backward()
        self.step()

    def modify(self) -> None:
        with self.offloaded.gathered(modify=True), torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.next.values[name])

    def save(self) -> None:
        self.offloaded.save(self.folder / "other")

    def save_behind(self) -> None:
        self.offloaded.save(self.folder / "other", block=False).result()

    def load(self) -> None:
        self.offloaded.load(self.folder / "next")

    def snapshot(self) -> None:
        self.offloaded.snapshot("point")

    def drop(self) -> None:
        self.offloaded.drop_snapshot("point")

    def spill(self) -> None:
        """Gradients of a second backward pass, beside those of the first."""
        self.forward()
        self.backward()

    # What comes before and after.

    def now(self) -> Moment:
        with self.offloaded.gathered():
            values = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        return Moment(max(self.offloaded._training.steps), values)

    def saved(self, name: str) -> Moment:
        self.offloaded.save(self.folder / name)
        return self.now()

    def go_back(self) -> None:
        self.loss = None
        self.offloaded.load(self.folder / "start")

    def _remains(self) -> dict[str, Any]:
        """What must be the same whenever the model is at rest."""
        state = self.offloaded._training.state
        self.loss = None
        self.offloaded.flush()
        state.weights.drop()
        gc.collect()
        found: dict[str, Any] = {name: slab.used_bytes for name, slab in state.slabs.items()}
        if state.extents is not None:
            found["extents"] = state.extents.used_bytes
        found["activations"] = at_rest(self.activations.counts)
        found["pins"] = len(state.weights._pins)
        found["held"] = len([*self.offloaded._training.residency.held])
        found["rest"] = Leftovers.of(self.folder / "nvme")
        return found

    def undisturbed_after(self, action: str) -> str:
        """What is wrong after an interrupt of ``action``, if something is."""
        wrong = str(getattr(self, f"_after_{action}")())
        if wrong:
            return wrong
        if (remains := self._remains()) != self.remains:
            return f"left behind: {_difference(remains, self.remains)}"
        return ""

    def before(self, action: str) -> None:
        """Come to where ``action`` can be taken."""
        self.go_back()
        if action in ("backward", "step", "flush", "spill"):
            self.forward()
        if action in ("step", "flush", "spill"):
            self.backward()
        if action == "flush":
            self.step()
        if action in ("save", "save_behind"):
            self.offloaded.save(self.folder / "other")
        if action == "drop":
            self.snapshot()

    def _after_forward(self) -> str:
        self.loss = None
        self.offloaded.optimizer.zero_grad()
        return self._goes_on()

    _after_backward = _after_spill = _after_forward

    def _after_step(self) -> str:
        if max(self.offloaded._training.steps) == self.start.steps:
            self.step()
        return self._goes_on()

    def _after_flush(self) -> str:
        return self._goes_on()

    def _after_modify(self) -> str:
        try:
            found = self.now().values
        except RuntimeError as refusal:  # of what could be neither written nor put back
            if "load a checkpoint" not in str(refusal):
                raise
            found = {}
        for name, value in found.items():
            if not any(same_bits(value, m.values[name]) for m in (self.start, self.next)):
                return f"{name} is neither as before nor as after"
        self.go_back()
        return self._goes_on()

    def _after_save(self) -> str:
        self.offloaded.load(self.folder / "other")
        return self._goes_on()

    _after_save_behind = _after_save

    def _after_snapshot(self) -> str:
        """It is there or not; what is there is whole."""
        wrong = self._goes_on()
        if not wrong and self.offloaded.snapshots():
            self.offloaded.restore("point")
            self.drop()
            wrong = self._goes_on()
        return wrong

    _after_drop = _after_snapshot

    def _after_load(self) -> str:
        try:
            found = self.now()
        except infinity.MixedStateError:
            pass  # until it is loaded again
        else:
            if not any(self._is_all(m, found) for m in (self.start, self.next)):
                return "neither as before nor as after, and not refused"
        self.load()
        return self._is(self.next) or self._goes_on()

    def _is_all(self, expected: Moment, found: Moment) -> bool:
        values = (same_bits(found.values[name], v) for name, v in expected.values.items())
        return found.steps == expected.steps and all(values)

    def _goes_on(self) -> str:
        """As an undisturbed run does, until ``later``."""
        if max(self.offloaded._training.steps) == self.start.steps:
            if wrong := self._is(self.start):
                return wrong
            self.train()
        if wrong := self._is(self.next):
            return wrong
        self.train()
        return self._is(self.later)

    def _is(self, expected: Moment) -> str:
        found = self.now()
        if found.steps != expected.steps or {*self.offloaded._training.steps} != {expected.steps}:
            return f"steps are {self.offloaded._training.steps}, not {expected.steps}"
        for name, value in expected.values.items():
            if not same_bits(found.values[name], value):
                return f"{name} differs after {expected.steps} steps"
        return ""

    def interrupted(self, action: str, number: int | None, how: How = interrupt) -> Found:
        """``action``, interrupted at its line ``number``, and what is wrong with what follows."""
        self.before(action)
        lines = how(getattr(self, action), number)
        try:
            return lines, self.undisturbed_after(action)
        except Exception as error:
            return lines, f"{type(error).__name__}: {error}"


ACTIONS = (
    *("forward", "backward", "spill", "step", "flush"),
    *("modify", "save", "save_behind", "load"),
)
CRITICAL_ACTIONS = ("step", "flush", "modify", "save", "save_behind", "load", "snapshot", "drop")


class Blocks:
    """Blocks that are entered or left with an interrupt. The model has real parameters and its
    values after it, nothing is left, and the next block is as any other.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.nvme = folder / "nvme"
        self.nvme.mkdir()
        self._scenario = scenario
        self._options: dict[str, Any] = {"activations": scenario.activations, "host_memory": WHOLE}
        if scenario.is_least:
            least = least_budget(scenario.make, self.nvme, activations=scenario.activations)
            self._options["host_memory"] = least
        self.first, self.trained = values_of(scenario.make()), self._life(scenario.make())
        self.before = Remains.of(self.nvme)

    def interrupted(self, action: str, number: int | None, how: How = interrupt) -> Found:
        """A block whose "enter" or "exit" is interrupted, and what is wrong with what follows."""
        model = self._scenario.make()
        block = infinity.offload(model, self.nvme, **self._options)
        if action == "enter":
            lines, expected = how(block.__enter__, number), self.first
            if not lines.line:
                block.__exit__(None, None, None)
        else:
            self._train(model, block.__enter__())
            lines = how(lambda: block.__exit__(None, None, None), number)
            if number == 0:  # before the first statement, where nothing can be caught
                block.__exit__(None, None, None)
            expected = self.trained
        return lines, self._wrong_with(model, expected)

    def failed(self, action: str, attempt: Callable[[Callable[[], object]], bool]) -> str:
        """A block that is entered or left by ``attempt``, which gives whether that worked, and what
        is wrong with what follows. Files that could not be removed go with the next block.
        """
        model = self._scenario.make()
        block = infinity.offload(model, self.nvme, **self._options)
        if action == "enter":
            if attempt(block.__enter__):
                block.__exit__(None, None, None)
            return self._wrong_with(model, self.first, reclaims=True)
        self._train(model, block.__enter__())
        attempt(lambda: block.__exit__(None, None, None))
        return self._wrong_with(model, self.trained, reclaims=True)

    def _wrong_with(self, model: nn.Module, expected: Values, *, reclaims: bool = False) -> str:
        if any(type(p) is not nn.Parameter or p.is_meta for p in model.parameters()):
            return "parameters are not real"
        if not _are_same(values_of(model), expected):
            return "values are others"
        if not reclaims and (remains := Remains.of(self.nvme, wanted=self.before)) != self.before:
            return f"left behind: {remains}"
        if not _are_same(self._life(self._scenario.make()), self.trained):
            return "the next block differs"
        remains = Remains.of(self.nvme, wanted=self.before)
        return "" if remains == self.before else f"left behind: {remains}"

    def _train(self, model: nn.Module, offloaded: OffloadedModel) -> None:
        for _ in range(2):
            torch.autograd.backward(self._scenario.loss(model))
            offloaded.step()

    def _life(self, model: nn.Module) -> Values:
        with infinity.offload(model, self.nvme, **self._options) as offloaded:
            self._train(model, offloaded)
        return values_of(model)


def _are_same(found: Values, expected: Values) -> bool:
    return all(same_bits(found[name], value) for name, value in expected.items())


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value} not {expected[key]}"
        for key, value in found.items()
        if value != expected[key]
    )


@contextmanager
def running(scenario: Scenario, folder: Path) -> Iterator[Run]:
    nvme = folder / "nvme"
    nvme.mkdir()
    offload = partial(infinity.offload, activations=scenario.activations)
    host_memory = WHOLE
    if scenario.is_least:
        host_memory = least_budget(scenario.make, nvme, activations=scenario.activations)
    model = scenario.make()
    with offload(model, nvme, host_memory=host_memory) as offloaded:
        yield Run(scenario, model, offloaded, folder)
