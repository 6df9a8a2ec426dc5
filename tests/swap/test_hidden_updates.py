"""Updates of what is in host memory begin during the backward pass where there is a spare block,
and what is at home stays as it is until the step is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.optim.adamw import AdamRule
from swap.plan.layout import PIECE, Segment, pack
from swap.plan.rules import ParameterUpdate
from swap.tiered import TieredState
from swap.update.stages import Job, Stages, Step
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import (
    Plain,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    same_bits,
    specs_of,
    step_both,
    wait_until_stopped_ahead,
)

SIZES = (PIECE, 5 * PIECE + 7, 2 * PIECE, PIECE + 1)
"""Each subgroup has two pieces at most: the second is split into three of them."""
ALL = range(len(SIZES))
SPARED = {0, 1, 3, 4}
"""Of the subgroups 0 to 5."""
TIMEOUT = 10.0


class Kernels:
    """The subgroups whose update has been computed, or begun on a device, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[int] = []
        self._changed = threading.Condition()
        for name in ("run_kernel", "start_visit"):
            self._note(monkeypatch, name)

    def _note(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        run = getattr(Stages, name)

        def run_and_note(stages: Stages, job: Job) -> None:
            run(stages, job)
            with self._changed:
                self.done.append(job.subgroup.index)
                self._changed.notify_all()

        monkeypatch.setattr(Stages, name, run_and_note)

    def wait_for(self, groups: set[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(self.done) >= groups, TIMEOUT), self.done


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


class FailingRule(AdamRule):
    """Raises in the midst of an update, ``times`` times, when some of it is done."""

    times = 0

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        super().apply(segment, update, components, gradient, gradient_scale)
        self._fail()

    def apply_aside(
        self,
        segment: Segment,
        update: ParameterUpdate,
        old: Mapping[str, torch.Tensor],
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        super().apply_aside(segment, update, old, components, gradient, gradient_scale)
        self._fail()

    def _fail(self) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("a rule that fails")


@contextmanager
def both(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rule: AdamRule | None = None,
    device: Callable[[], SimulatedDevice] | None = None,
    spared: set[int] = SPARED,
    overlap: bool = True,
) -> Iterator[tuple[TieredState, Plain]]:
    """Everything in host memory, after a step from which the next one is expected."""
    specs = specs_of(SIZES, dtype)
    placement = placement_of(
        pack(specs, 2 * PIECE),
        state_on_nvme=lambda unit: False,
        gradient_on_nvme=lambda group: False,
        spared=lambda group: group in spared,
        arena_bytes=0,
        inbox_bytes=0 if device is None else 12 * PIECE * 4,
        device_bytes=0 if device is None else 16 * PIECE * 4,
    )
    assert placement.nvme_bytes == 0
    with ExitStack() as stack:
        rule = rule or AdamRule(threads=1)
        made = None if device is None else device()
        state = TieredState(placement, rule, [folder], overlap=overlap, device=made)
        stack.callback(state.close)
        plain = Plain(specs)
        fill_both(state, plain)
        state.speculation.expect_step = lambda: Step(updates=plain.updates(ALL), gradient_scale=1.0)
        backward(state, plain, 1)
        step_both(state, plain, ALL)
        assert_same(state, plain)
        yield state, plain


def backward(state: TieredState, plain: Plain, number: int) -> None:
    for parameter in reversed(ALL):
        add_to_both(state, plain, parameter, seed=10 * number + parameter)


def read_home(state: TieredState, plain: Plain) -> None:
    """What is at home is as ``plain`` has it, be an update under way."""
    for spec in plain.specs:
        for name, expected in plain.components[spec.index].items():
            out = torch.empty_like(expected)
            state.components.read(spec.index, name, 0, out)
            assert same_bits(out, expected), f"{name} of {spec.name} differs"


DEVICES = [None, SimulatedDevice, partial(SimulatedDevice, 1)]


@pytest.mark.parametrize("device", DEVICES, ids=["host", "latest", "seed 1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_spared_subgroups_are_updated_in_backward_and_the_rest_after_the_step(
    tmp_path: Path, kernels: Kernels, dtype: torch.dtype, device: Any
) -> None:
    with both(tmp_path, dtype=dtype, device=device) as (state, plain):
        for number in range(2, 5):
            kernels.done.clear()
            backward(state, plain, number)
            kernels.wait_for(SPARED)
            read_home(state, plain)
            step_both(state, plain, ALL)
            assert_same(state, plain)
            assert set(kernels.done[: len(SPARED)]) == SPARED
            assert sorted(kernels.done[len(SPARED) :]) == [2, 5], "each is computed once"


def test_without_a_spare_block_nothing_is_updated_before_the_step(
    tmp_path: Path, kernels: Kernels
) -> None:
    with both(tmp_path, spared=set()) as (state, plain):
        kernels.done.clear()
        backward(state, plain, 2)
        assert state.pipeline.is_idle
        assert kernels.done == []
        step_both(state, plain, ALL)
        assert_same(state, plain)


def test_without_overlap_nothing_is_updated_before_the_step(
    tmp_path: Path, kernels: Kernels
) -> None:
    with both(tmp_path, overlap=False) as (state, plain):
        kernels.done.clear()
        backward(state, plain, 2)
        assert kernels.done == []
        step_both(state, plain, ALL)
        assert_same(state, plain)


@pytest.mark.parametrize("device", DEVICES, ids=["host", "latest", "seed 1"])
def test_a_step_other_than_expected_begins_from_what_was_there(
    tmp_path: Path, kernels: Kernels, device: Any
) -> None:
    with both(tmp_path, device=device) as (state, plain):
        others: list[Callable[[], None]] = [
            lambda: step_both(state, plain, ALL, scale=0.5),
            lambda: step_both(state, plain, ALL, lr=1e-3),
            lambda: step_both(state, plain, range(1, len(SIZES))),
            lambda: backward(state, plain, 100),  # accumulates
            lambda: step_both(state, plain, ALL),
        ]
        for number, other in enumerate(others, 2):
            kernels.done.clear()
            backward(state, plain, number)
            if state.speculation._expected is not None:
                kernels.wait_for({0})
            other()
        assert_same(state, plain)


def test_cleared_gradients_leave_everything_as_it_was(tmp_path: Path, kernels: Kernels) -> None:
    with both(tmp_path) as (state, plain):
        kernels.done.clear()
        backward(state, plain, 2)
        kernels.wait_for(SPARED)
        state.clear_gradients()
        plain.gradients.clear()
        assert_same(state, plain)


def test_weights_stay_where_they_are_and_the_rest_changes_places(
    tmp_path: Path, kernels: Kernels
) -> None:
    def addresses(name: str) -> list[int]:
        return [state.components.arrays.of(group, name).data_ptr() for group in range(6)]

    with both(tmp_path) as (state, plain):
        weights, moments = addresses("weight"), addresses("exp_avg")
        views = [state.weights.borrow(parameter) for parameter in ALL]
        whole = state.components.arrays.values(1, "exp_avg")
        assert whole is not None
        for number in (2, 3):
            kernels.done.clear()
            backward(state, plain, number)
            kernels.wait_for(SPARED)
            step_both(state, plain, ALL)
            state.flush()
            assert addresses("weight") == weights
            moved = {g for g, at in enumerate(addresses("exp_avg")) if at != moments[g]}
            assert moved == (SPARED if number == 2 else set()), "and back again"
            assert (state.components.arrays.values(1, "exp_avg") is None) == (number == 2)
            for parameter, view in enumerate(views):
                assert same_bits(view, plain.weight(parameter)), "they follow the update"


def test_a_rule_that_raises_in_backward_leaves_the_state_whole(
    tmp_path: Path, kernels: Kernels
) -> None:
    rule = FailingRule(threads=1)
    with both(tmp_path, rule=rule) as (state, plain):
        rule.times = 1
        for parameter in reversed(ALL):
            add_to_both(state, plain, parameter, seed=20 + parameter)
        wait_until_stopped_ahead(state)
        read_home(state, plain)
        step_both(state, plain, ALL)
        assert_same(state, plain)


def test_values_written_between_steps_are_what_updates_begin_from(
    tmp_path: Path, kernels: Kernels
) -> None:
    with both(tmp_path) as (state, plain):
        for number in range(2, 5):
            kernels.done.clear()
            backward(state, plain, number)
            kernels.wait_for(SPARED)
            step_both(state, plain, ALL)
            state.flush()
            fill_both(state, plain, seed=number)
            state.components.zero("exp_avg")
            for components in plain.components:
                components["exp_avg"].zero_()
        assert_same(state, plain)
