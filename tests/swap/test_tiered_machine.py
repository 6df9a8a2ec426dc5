"""Training state over tiers does what plain tensors do, in any order of calls and from any homes.

The machine drives a ``TieredState`` and its plain twin. Everything is compared to the last bit; the
engine under it is mostly a late one, so that memory or space which comes back too soon is seen.
"""

import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from swap.device.visits import Pace
from swap.plan.layout import PIECE, pack
from swap.tiered import TieredState
from swap.tiers import BudgetError
from swap.update.stages import Step
from tests.support.examples import examples, is_a_part
from tests.support.late_engine import LateEngine
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import (
    RULE,
    Leftovers,
    Plain,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    random_values,
    same_bits,
    specs_of,
)

MOST = 5 * PIECE + 3
NUM = 7
sizes = st.one_of(
    st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, MOST]), st.integers(0, 3 * PIECE)
)
parameters = st.integers(0, NUM - 1)
some_parameters = st.lists(parameters, min_size=1, max_size=4)


class TiersMachine(RuleBasedStateMachine):
    """Rules call both sides alike and compare what they return."""

    @initialize(
        seed=st.integers(0, 1 << 20),
        numels=st.lists(sizes, min_size=NUM, max_size=NUM),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        frozen=st.sets(parameters, max_size=2),
        always_on_host=st.sets(parameters, max_size=2),
        state_on_host=st.sets(st.integers(0, NUM)),
        gradient_on_host=st.sets(st.integers(0, 3 * NUM)),
        spared=st.sets(st.integers(0, 3 * NUM)),
        on_device=st.sets(st.integers(0, NUM)),
        room=st.sampled_from([1.0, 1.5, 3.0, 10.0]),
        slots=st.integers(1, 4),
        num_directories=st.integers(1, 3),
        late=st.sampled_from([True, True, False]),
        simulated=st.booleans(),
        overlap=st.sampled_from([True, True, False]),
        speculative=st.booleans(),
    )
    def build(
        self,
        *,
        seed: int,
        numels: list[int],
        dtype: torch.dtype,
        frozen: set[int],
        always_on_host: set[int],
        state_on_host: set[int],
        gradient_on_host: set[int],
        spared: set[int],
        on_device: set[int],
        room: float,
        slots: int,
        num_directories: int,
        late: bool,
        simulated: bool,
        overlap: bool,
        speculative: bool,
    ) -> None:
        self.stack = ExitStack()
        small = {index for index in always_on_host if numels[index] <= PIECE}
        specs = specs_of(numels, dtype, frozen=frozen, always_on_host=small)
        layout = pack(specs, 2 * PIECE)
        self.arena_bytes = int(room * max(s.padded_numel for s in specs) * dtype.itemsize)
        self.arena_bytes = -(-self.arena_bytes // PIECE) * PIECE
        self.placement = placement_of(
            layout,
            state_on_nvme=lambda unit: unit not in state_on_host,
            gradient_on_nvme=lambda group: group not in gradient_on_host,
            on_device=lambda unit: simulated and unit in on_device,
            arena_bytes=self.arena_bytes,
            spared=lambda group: group in spared,
            num_slots=slots,
            inbox_bytes=2 * MOST * 4 // PIECE * PIECE if simulated else 0,
            device_bytes=self.arena_bytes if simulated else 0,
        )
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.folders = [folder / str(number) for number in range(num_directories)]
        for path in self.folders:
            path.mkdir()
        self.device = SimulatedDevice(seed) if simulated else None
        self.before = Leftovers.of(*self.folders)
        self.stack.enter_context(patch("swap.gradients.spill._RELEASE_SECONDS", 5.0))
        visits = random.Random(seed)
        self.stack.enter_context(
            patch.object(Pace, "is_sooner_there", lambda *_: visits.random() < 0.5)
        )
        if late:
            self.stack.enter_context(late_engines(seed))
        self.state = TieredState(
            self.placement,
            RULE,
            self.folders,
            shares=[1.0 + number for number in range(num_directories)],
            overlap=overlap,
            device=self.device,
        )
        self.plain = Plain(specs)
        self.held: list[tuple[tuple[int, ...], list[torch.Tensor], list[torch.Tensor]]] = []
        self.count = 0
        fill_both(self.state, self.plain, seed)
        if speculative:
            self.state.speculation.expect_step = self._expect_step

    def _expect_step(self) -> Step | None:
        trained = [spec.index for spec in self.plain.specs if spec.trainable]
        return Step(updates=self.plain.updates(trained), gradient_scale=1.0)

    def _next(self) -> int:
        self.count += 1
        return self.count

    # Weights.

    @rule(wanted=some_parameters)
    def acquire(self, wanted: list[int]) -> None:
        try:
            weights = self.state.weights.acquire(wanted, holder := (self._next(), *wanted))
        except BudgetError:
            assert self.held or len(set(wanted)) > 1, "one parameter alone always fits"
            return
        for parameter, weight in zip(wanted, weights, strict=True):
            assert same_bits(weight, self.plain.weight(parameter))
        self.held.append((holder, weights, [weight.clone() for weight in weights]))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        holder, _, _ = self.held.pop(which % len(self.held))
        self.state.weights.release(holder)

    @rule(parameter=parameters)
    def borrow(self, parameter: int) -> None:
        try:
            weight = self.state.weights.borrow(parameter)
        except BudgetError:
            assert self.held
            return
        assert same_bits(weight, self.plain.weight(parameter))
        if self.state.weights.at_home(parameter) is None and weight.numel():
            owner = self.state.weights.owner(weight.untyped_storage()._cdata)
            assert owner in (parameter, None), "None: it was evicted for something sooner"

    @rule()
    def forward_and_backward(self) -> None:
        """What the schedule learns from: all weights forth and back, and a gradient for each."""
        if self.held:
            return
        order = range(NUM)
        for parameter in (*order, *reversed(order)):
            self.acquire([parameter])
            if self.held:
                self.release(0)
        for parameter in reversed(order):
            self.add_gradient(parameter)

    # Gradients and steps.

    @rule(parameter=parameters)
    def add_gradient(self, parameter: int) -> None:
        spec = self.plain.specs[parameter]
        if spec.trainable:
            gradient = random_values(self._next(), spec.numel, spec.dtype)
            self.state.add_gradient(parameter, gradient)
            self.plain.add_gradient(parameter, gradient)

    @rule(parameter=st.one_of(st.none(), parameters))
    def clear_gradients(self, parameter: int | None) -> None:
        self.state.clear_gradients(parameter)
        if parameter is None:
            self.plain.gradients.clear()
        else:
            self.plain.gradients.pop(parameter, None)

    @rule()
    def read_gradients(self) -> None:
        self.state.collect_gradients()
        assert self.state.gradients.present == self.plain.gradients.keys()
        assert self.state.gradients.norm() == self.plain.norm()
        for parameter, expected in self.plain.gradients.items():
            assert same_bits(self.state.gradients.read(parameter), expected)

    @rule(without=st.sets(parameters, max_size=2), scale=st.sampled_from([1.0, 1.0, 0.25]))
    def step(self, without: set[int], scale: float) -> None:
        updates = self.plain.updates(sorted(self.plain.gradients.keys() - without))
        self.state.step(updates, scale)
        self.plain.step(updates, scale)

    @rule()
    def flush(self) -> None:
        self.state.flush()
        self._check_extents()

    def _check_extents(self) -> None:
        """What is kept on NVMe is what has a reason to be there."""
        if self.state.extents is None:
            return
        published = {e for e in self.state.components._on_nvme.values() if e is not None}
        spilled = set(self.state.gradients._on_nvme.values())
        expected = sum(extent.nbytes for extent in published | spilled)
        assert self.state.extents.used_bytes == expected

    # Values.

    @rule(parameter=parameters, data=st.data())
    def write_values(self, parameter: int, data: st.DataObject) -> None:
        numel = self.plain.specs[parameter].numel
        start = data.draw(st.integers(0, numel))
        length = data.draw(st.integers(0, numel - start))
        values = random_values(self._next(), length)
        self.state.flush()
        self.state.write_values(parameter, start, values)
        self.plain.write(parameter, start, values)

    @rule(parameter=parameters)
    def read_values(self, parameter: int) -> None:
        self.state.flush()
        expected = self.plain.values(parameter)
        out = torch.empty_like(expected)
        self.state.read_all(parameter, out)
        assert same_bits(out, expected)

    @rule()
    def compare(self) -> None:
        assert_same(self.state, self.plain)

    # What holds all the time.

    @invariant()
    def held_weights_do_not_change(self) -> None:
        """Until they are let go, whatever happens to the parameters."""
        if not hasattr(self, "held"):
            return
        for (_, *wanted), weights, copies in self.held:
            for parameter, weight, copy in zip(wanted, weights, copies, strict=True):
                if self.state.weights.at_home(parameter) is None:
                    assert same_bits(weight, copy)

    @invariant()
    def budgets_are_kept(self) -> None:
        if not hasattr(self, "state"):
            return
        arena = self.state.arena
        if arena is not None:
            assert arena.peak_bytes <= self.arena_bytes
        assert self.state.peak_host_bytes <= self.placement.host_bytes

    @invariant()
    def what_the_device_does_is_ordered(self) -> None:
        device: SimulatedDevice | None = getattr(self, "device", None)
        if device is not None:
            device.check()

    def teardown(self) -> None:
        if hasattr(self, "state"):
            try:
                self._end()
            finally:
                self.stack.close()

    def _end(self) -> None:
        try:
            for holder, _, _ in self.held:
                self.state.weights.release(holder)
            assert_same(self.state, self.plain)
            self._check_extents()
        finally:
            self.state.close()
            engine: Any = self.state.engine
            if isinstance(engine, LateEngine):
                assert engine.num_in_flight == 0
        self.held.clear()
        assert Leftovers.of(*self.folders) == self.before


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None, derandomize=is_a_part()
)
