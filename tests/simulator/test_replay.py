"""The replay: it keeps to the bytes, the homes and the limits of what it replays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.homes import Homes, homes_of
from simulator.rates import Rates
from simulator.recording import record
from simulator.replay import Pattern, StepTimes, simulate
from simulator.trace import Trace
from simulator.transformer import Transformer

import infinity
from swap.plan.traffic import traffic_of
from swap.tiers import Budget, BudgetError, Tier
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget

MIB = 1 << 20
MODEL = Transformer(layers=8, hidden=512, tokens=128, micro_batch=4, recomputes=False)
TRACE = MODEL.trace()
SECONDS = 2.0
"""What the model computes in a step, at the rate below."""
RATES = Rates(
    flops=MODEL.flops / SECONDS,
    ssd_read=1e9,
    ssd_write=1e9,
    adam=2e9,
    gradients=10e9,
    computes_on_host=True,
)
DEVICE = replace(RATES, computes_on_host=False, to_device=10e9, from_device=10e9)
SMALL = Budget(host_bytes=80 * MIB)
LARGE = Budget(host_bytes=2048 * MIB)
GPU = Budget(host_bytes=80 * MIB, device_bytes=64 * MIB)


def _on_host(budget: Budget, **changes: Any) -> StepTimes:
    return simulate(TRACE, homes_of(TRACE, budget, on_host=True), replace(RATES, **changes))


def test_a_step_in_memory_computes_updates_and_moves_nothing() -> None:
    times = _on_host(LARGE)
    alone = SECONDS + MODEL.num_parameters / RATES.adam + 2 * MODEL.num_parameters / RATES.gradients
    assert times.step_seconds == pytest.approx(alone, rel=1e-3)
    assert times.read_bytes == times.written_bytes == 0
    # The kernel slows computing down where both are at work.
    assert times.compute_seconds >= SECONDS


def test_a_slow_disk_makes_a_step_as_long_as_its_bytes() -> None:
    times = _on_host(SMALL, ssd_read=50e6, ssd_write=50e6, ssd_together=50e6)
    moving = (times.read_bytes + times.written_bytes) / 50e6
    assert moving <= times.step_seconds <= 1.05 * moving
    assert times.stall_seconds > 0


def test_a_fast_disk_leaves_computing() -> None:
    times = _on_host(SMALL, ssd_read=100e9, ssd_write=100e9)
    work = SECONDS + MODEL.num_parameters / RATES.adam + 2 * MODEL.num_parameters / RATES.gradients
    assert times.step_seconds == pytest.approx(work, rel=0.02)


@pytest.mark.parametrize("rate", [50e6, 500e6])
@pytest.mark.parametrize("host_mib", [80, 200])
def test_a_step_is_never_faster_than_its_parts(rate: float, host_mib: int) -> None:
    times = _on_host(Budget(host_bytes=host_mib * MIB), ssd_read=rate, ssd_write=rate)
    assert times.step_seconds >= SECONDS
    assert times.step_seconds * (1 + 1e-9) >= times.read_bytes / rate
    assert times.step_seconds * (1 + 1e-9) >= times.written_bytes / rate


@pytest.mark.parametrize("passes", [1, 2])
def test_bytes_are_those_of_the_formula_but_for_weights_in_the_arena(passes: int) -> None:
    homes = homes_of(TRACE, SMALL, on_host=True)
    times = simulate(TRACE, homes, RATES, Pattern(passes=passes))
    traffic = traffic_of(homes.placement, backward_passes=passes)
    assert times.written_bytes == pytest.approx(traffic.written, rel=1e-6)
    without = traffic.read - traffic.weights_read
    most = without + traffic.weights_read + 2 * traffic.weights_kept
    assert without <= times.read_bytes <= most * (1 + 1e-6)


def test_the_same_replay_gives_the_same_result() -> None:
    assert _on_host(SMALL) == _on_host(SMALL)


def test_clipping_keeps_updates_from_beginning_in_the_backward_pass() -> None:
    homes = homes_of(TRACE, SMALL, on_host=True)
    rates = replace(RATES, ssd_read=200e6, ssd_write=200e6)
    free = simulate(TRACE, homes, rates)
    clipped = simulate(TRACE, homes, rates, Pattern(is_clipped=True))
    assert clipped.step_seconds > free.step_seconds


def test_checkpoints_behind_training_share_the_disk_with_it() -> None:
    homes = homes_of(TRACE, SMALL, on_host=True)
    rates = replace(RATES, ssd_read=200e6, ssd_write=200e6)
    alone = simulate(TRACE, homes, rates)
    saving = simulate(TRACE, homes, rates, Pattern(save_bytes=100 * MIB))
    assert saving.save_seconds >= 100 * MIB / 200e6
    assert saving.step_seconds > alone.step_seconds
    assert saving.written_bytes == pytest.approx(alone.written_bytes + 100 * MIB, rel=1e-6)


# On devices, and over ranks.


def _ranks(world_size: int, **changes: Any) -> StepTimes:
    homes = homes_of(TRACE, GPU, world_size=world_size)
    return simulate(TRACE, homes, replace(DEVICE, **changes))


def test_a_device_computes_while_the_host_updates() -> None:
    homes = homes_of(TRACE, GPU)
    times = simulate(TRACE, homes, replace(DEVICE, ssd_read=100e9, ssd_write=100e9, adam=20e6))
    kernel = MODEL.num_parameters / 20e6
    assert times.kernel_seconds == pytest.approx(kernel, rel=0.01)  # it stores gradients, too
    assert max(SECONDS, kernel) <= times.step_seconds < 0.95 * (SECONDS + kernel)


def test_ranks_share_the_bytes_on_disk_and_gather_the_rest() -> None:
    few = Budget(host_bytes=64 * MIB, device_bytes=64 * MIB)
    homes = {size: homes_of(TRACE, few, world_size=size) for size in (1, 2)}
    kept = [sum(s.numel for s in homes[size].placement.layout.specs) for size in (1, 2)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=1e-6)
    times = simulate(TRACE, homes[2], DEVICE)
    # Every rank receives the other's half of all weights, at least once, and of all gradients.
    assert times.received_bytes >= 2 * MODEL.num_parameters


def test_a_slow_network_makes_a_step_as_long_as_what_is_received() -> None:
    times = _ranks(4, network=10e6)
    received = times.received_bytes / 10e6
    assert received <= times.step_seconds <= 1.1 * received


def test_activations_take_the_link_and_the_disk() -> None:
    model = replace(MODEL, recomputes=True)
    trace = model.trace()
    homes = homes_of(trace, GPU)
    moved = [
        simulate(trace, homes, DEVICE, Pattern(activations=tier)).written_bytes
        for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)
    ]
    assert moved[0] == pytest.approx(moved[1])
    assert moved[2] == pytest.approx(moved[0] + model.checkpoint_bytes)


@pytest.mark.parametrize("budget", [Budget(host_bytes=8 * MIB, device_bytes=64 * MIB), GPU])
def test_a_budget_that_cannot_work_is_refused(budget: Budget) -> None:
    trace = replace(MODEL, hidden=4096, layers=1).trace()
    with pytest.raises(BudgetError, match="too small"):
        homes_of(trace, budget)


# What is recorded.


def _recorded() -> Trace:
    model = seeded(Stack)
    return record(model, lambda: vector_loss(model, 0).backward())


def test_a_recorded_trace_has_every_use_and_every_gradient_in_order() -> None:
    trace = _recorded()
    names = [spec.name for spec in trace.specs]
    assert names == [name for name, _ in Stack().named_parameters()]
    forward = [i for op in trace.ops if op.phase == "forward" for i in op.uses]
    assert forward == list(range(len(names)))
    gradients = [i for op in trace.ops for i in op.gradients]
    assert sorted(gradients) == list(range(len(names)))
    assert all(op.phase == "backward" for op in trace.ops if op.gradients)
    backward = [i for op in trace.ops if op.phase == "backward" for i in op.uses]
    large = [spec.index for spec in trace.specs if not spec.resident]
    assert [i for i in backward if i in large] == large[:0:-1]  # the first needs no input gradient


def test_a_trace_goes_through_json_and_keeps_its_proportions_when_it_is_scaled() -> None:
    trace = _recorded()
    assert Trace.from_json(trace.as_json()) == trace
    scaled = trace.scaled({"forward": 1.0, "backward": 3.0})
    assert scaled.seconds("forward") == pytest.approx(1.0)
    assert scaled.seconds("backward") == pytest.approx(3.0)
    for wrong in ({}, {"parameters": 3}, trace.as_json() | {"ops": [{"phase": "sideways"}]}):
        with pytest.raises(ValueError, match=r"trace|phase"):
            Trace.from_json(wrong)


@pytest.mark.parametrize("extra", [0, 2 * MIB, WHOLE])
def test_homes_are_those_that_offload_gives(extra: int, tmp_path: Path) -> None:
    least = least_budget(Stack, tmp_path)
    model = seeded(Stack)
    trace = _recorded()
    with infinity.offload(model, tmp_path, host_memory=least + extra) as offloaded:
        placement = offloaded._training.state.placement
    homes: Homes = homes_of(trace, Budget(host_bytes=least + extra), on_host=True)
    assert homes.placement == placement


def test_a_replay_of_a_recorded_step_writes_what_the_step_writes(tmp_path: Path) -> None:
    least = least_budget(Stack, tmp_path)
    model = seeded(Stack)
    trace = _recorded()
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        for step in range(4):
            offloaded.flush()
            before = offloaded.report().written_bytes
            vector_loss(model, step).backward()
            offloaded.step()
            offloaded.flush()
            moved = offloaded.report().written_bytes - before
    homes = homes_of(trace, Budget(host_bytes=least), on_host=True)
    times = simulate(trace, homes, RATES, Pattern(steps=1))
    assert times.written_bytes == pytest.approx(moved, rel=1e-6)
    assert torch.float32 in {spec.dtype for spec in trace.specs}
