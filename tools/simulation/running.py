"""Steps of a model over the library's tiers, in simulated time."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch

from aio import Engine
from infinity.optim.adamw import AdamRule
from simulation.devices import SimulatedDevice
from simulation.disks import SimulatedEngine
from simulation.hardware import Hardware, Resource
from simulation.model import SCALE, Llama, in_small, placed
from swap.device.interface import Stream
from swap.gradients.inbox import _BATCH_BYTES, MOST_COMING_BYTES, GradientInbox
from swap.plan.layout import Segment
from swap.plan.placement import Placement
from swap.plan.rules import ParameterUpdate
from swap.tiered import TieredState
from swap.tiers import Budget
from swap.update.stages import Step
from tests.support.turns import Turns

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LEARNING = 2
"""Steps that the library learns the order of uses and the number of gradients from."""
_MOST_TIMEOUTS = 100_000_000
_INBOX = partial(GradientInbox, most_coming_bytes=MOST_COMING_BYTES // SCALE)
"""What is under way at once is small as all memories are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates a second: operations, bytes, parameters that the processors update."""

    flops: float = 400e12
    link: float = 50e9
    adam: float = 4e9
    disk_read: float = 6e9
    disk_write: float = 6e9
    memory: float = 3e12
    """Of the device, bytes read and written: what updates of state at home there are bound by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds of each step, from the end of the backward pass before, as the device comes to it, to
    that of its own; what computing, and the update where its state is, take alone; what the disks
    take for what is moved.
    """

    steps: tuple[float, ...]
    compute: float
    update: float
    read: float
    written: float
    disk: float

    @property
    def step(self) -> float:
        """The mean of those in which schedules are known."""
        return statistics.mean(self.steps[LEARNING:])

    @property
    def over_the_larger(self) -> float:
        """Times what computing takes, or the disks."""
        return self.step / max(self.compute, self.disk)

    @property
    def seen_of_update(self) -> float:
        """The part of the update that a step is longer by than computing."""
        return (self.step - self.compute) / self.update


_MOVED_BY_KERNEL = 26
"""Bytes that the kernel reads and writes for a parameter, gradient included: as fast as memory."""
_MOVED_BY_COPY = 3
"""Times the bytes of a copy: they are read, and what they replace is read before it is written."""
_MOVED_BY_KEEPING = 3
"""Times the bytes of a gradient that stays on the device: copied, and read again for its norm."""
_TIMES_ASIDE = 1.31
"""What an update from values that stay takes of one in place, where the processors share it, by
tools/bench_adam.py. (One thread alone, which memory does not hold up, takes 1.66.)
"""


class _TimedRule(AdamRule):
    """Takes as long as the kernel does, and changes nothing."""

    def __init__(
        self, hardware: Hardware, processors: Resource, device: SimulatedDevice, memory: float
    ) -> None:
        super().__init__()
        self._hardware, self._processors = hardware, processors
        self._device, self._memory = device, memory

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        self._hardware.spend(self._processors, "update", segment.length * SCALE)

    def apply_aside(
        self,
        segment: Segment,
        update: ParameterUpdate,
        old: Mapping[str, torch.Tensor],
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        amount = _TIMES_ASIDE * segment.length * SCALE
        self._hardware.spend(self._processors, "update", amount)

    def apply_on_device(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        self._device.update(_MOVED_BY_KERNEL * segment.length * SCALE / self._memory)


def simulate(model: Llama, machine: Machine, budget: Budget, *, tokens: int, steps: int) -> Outcome:
    """``steps`` steps of ``tokens`` tokens each. Raises ``BudgetError`` and ``ValueError``."""
    placement = placed(model, AdamRule(), budget)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        real = stack.enter_context(Engine("posix", queue_depth=4))
        turns = Turns(0, (), most_timeouts=_MOST_TIMEOUTS)
        stack.enter_context(turns.applied())
        hardware = Hardware(turns)
        stack.callback(hardware.close)
        run = _Run(model, machine, hardware, real, tokens)
        return run.steps(placement, folder, steps)


class _Run:
    """A training loop that only takes time."""

    def __init__(
        self, model: Llama, machine: Machine, hardware: Hardware, real: Engine, tokens: int
    ) -> None:
        self._model, self._machine, self._hardware = model, machine, hardware
        self._tokens = tokens
        self._device = SimulatedDevice(hardware, machine.link, SCALE)
        self._processors = hardware.resource("processors", machine.adam)
        reads = hardware.resource("reads", machine.disk_read)
        writes = hardware.resource("writes", machine.disk_write)
        self._disks = (reads, writes)
        self._engine = SimulatedEngine(hardware, real, reads, writes, SCALE)
        sizes = model.modules
        ends = [sum(map(len, sizes[: number + 1])) for number in range(len(sizes))]
        self._parameters = [
            range(end - len(module), end) for end, module in zip(ends, sizes, strict=True)
        ]

    def steps(self, placement: Placement, folder: Path, steps: int) -> Outcome:
        rule = _TimedRule(self._hardware, self._processors, self._device, self._machine.memory)
        small = in_small(placement, rule)
        with ExitStack() as stack:
            engine = self._engine
            stack.enter_context(patch("swap.storage.opening.Engine", lambda **_: engine))
            stack.enter_context(patch("swap.storage.blocks.copy_values", self._copy))
            stack.enter_context(patch("swap.tiered.GradientInbox", _INBOX))
            stack.enter_context(patch("swap.gradients.inbox._BATCH_BYTES", _BATCH_BYTES // SCALE))
            state = TieredState(small, rule, [folder], device=self._device)
            stack.callback(state.close)
            taken = 0
            state.speculation.expect_step = lambda: self._step(taken + 1)
            ends = [self._device.record(Stream.COMPUTE)]
            moved: list[list[float]] = []
            for taken in range(steps):
                self._pass(state, forward=True)
                self._pass(state, forward=False)
                ends.append(self._device.record(Stream.COMPUTE))
                ends[-1].then(lambda: moved.append([disk.amount for disk in self._disks]))
                state.step(self._step(taken + 1).updates, 1.0)
            ends[-1].wait()
            per_step = _means(moved[LEARNING - 1 :])
            state.flush()
        return Outcome(
            steps=tuple(end.at - start.at for start, end in pairwise(ends)),
            compute=3 * sum(map(self._seconds, range(len(self._parameters)))),
            update=self._update_seconds(placement),
            read=per_step[0],
            written=per_step[1],
            disk=max(n / resource.rate for n, resource in zip(per_step, self._disks, strict=True)),
        )

    def _update_seconds(self, placement: Placement) -> float:
        """By the processors, and by the device of what is at home there."""
        there = sum(unit.numel for unit in placement.units_on_device)
        on_device = _MOVED_BY_KERNEL * there / self._machine.memory
        return (self._model.num_parameters - there) / self._machine.adam + on_device

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Within host memory: of new weights home."""
        moved = _MOVED_BY_COPY * source.nbytes * SCALE
        self._hardware.spend(self._processors, "update", moved / _MOVED_BY_KERNEL)

    def _seconds(self, module: int) -> float:
        return self._model.flops(module, self._tokens) / self._machine.flops

    def _pass(self, state: TieredState, *, forward: bool) -> None:
        modules = range(len(self._parameters))
        for module in modules if forward else reversed(modules):
            holder = (forward, module)
            state.weights.acquire(self._parameters[module], holder)
            if forward:
                self._device.compute(self._seconds(module))
            else:
                self._backward(state, module)
            state.weights.release(holder)

    def _backward(self, state: TieredState, module: int) -> None:
        """A gradient comes when its part of the module's arithmetic is done."""
        seconds = 2 * self._seconds(module) / sum(self._model.modules[module])
        for parameter in reversed(self._parameters[module]):
            spec = state.layout.specs[parameter]
            self._device.compute(seconds * spec.numel * SCALE)
            if state.gradients.is_on_device(parameter):
                moved = _MOVED_BY_KEEPING * spec.weight_bytes * SCALE
                self._device.compute(moved / self._machine.memory)
            state.add_gradient(parameter, torch.zeros(spec.numel, dtype=spec.dtype))

    def _step(self, number: int) -> Step:
        sizes = [numel for module in self._model.modules for numel in module]
        return Step(
            updates={
                index: ParameterUpdate(
                    parameter=index, step=number, shape=torch.Size([numel]), options=OPTIONS
                )
                for index, numel in enumerate(sizes)
            },
            gradient_scale=1.0,
        )


def _means(amounts: Sequence[Sequence[float]]) -> list[float]:
    """What is added to each from one time to the next."""
    pairs = zip(amounts[0], amounts[-1], strict=True)
    return [(after - before) / (len(amounts) - 1) for before, after in pairs]
