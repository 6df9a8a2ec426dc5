"""Bytes that a step moves are those that the formula of ``swap.plan.traffic`` has."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.report import Report
from swap.plan.traffic import Traffic, traffic_of
from swap.storage.drives.endurance import Wear, endurance_of
from swap.tiers import format_bytes
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.proof import matrix
from tests.support.training import WHOLE, Make, least_budget


def _trained() -> nn.Module:
    return Stack(depth=16)


def _half_frozen() -> nn.Module:
    model = Stack(depth=16)
    for layer in model.layers[::2]:
        layer.requires_grad_(False)
    return model


ROOMS = {"all on NVMe": 0.0, "some cached": 0.2, "half cached": 0.5, "most cached": 0.65}
STEPS = [*product(ROOMS, (None, torch.bfloat16), (1, 2))]
USUAL = [*STEPS[::4], *STEPS[3::4]]
"""Each room in each dtype, one pass in the one and two in the other."""


def _steady_step(
    make: Make, nvme: Path, *, dtype: torch.dtype | None, room: str, passes: int, overlap: bool
) -> tuple[Traffic, Traffic, Report]:
    """What the fifth step moved, what the formula has for it, and the report after it."""
    least = least_budget(make, nvme, compute_dtype=dtype)
    host_memory = least + int(ROOMS[room] * (16 << 20 if dtype is None else 12 << 20))
    model = seeded(make)
    with infinity.offload(
        model, nvme, compute_dtype=dtype, host_memory=host_memory, overlap=overlap
    ) as offloaded:
        for step in range(5):
            offloaded.flush()
            before = dict(offloaded._training.state.timeline.moved)
            for part in range(passes):
                vector_loss(model, step * passes + part).backward()
            if not overlap:
                offloaded.flush()  # or spills would be under way, and counted with the next step
            offloaded.step()
        offloaded.flush()
        moved = {
            key: nbytes - before.get(key, 0)
            for key, nbytes in offloaded._training.state.timeline.moved.items()
        }
        expected = traffic_of(offloaded._training.state.placement, backward_passes=passes)
        return _by_purpose(moved, expected.weights_kept), expected, offloaded.report()


@pytest.mark.parametrize(("room", "dtype", "passes"), matrix(STEPS, usual=USUAL))
def test_one_transfer_after_the_other_moves_what_the_formula_has(
    room: str, dtype: torch.dtype | None, passes: int, nvme: Path
) -> None:
    moved, expected, report = _steady_step(
        _trained, nvme, dtype=dtype, room=room, passes=passes, overlap=False
    )
    assert moved == expected
    assert expected.state_written > 0
    assert expected.weights_read == (2 * passes + 1) * (
        expected.weights_written - expected.weights_kept
    )
    assert (expected.gradients_written > 0) == (room in {"all on NVMe", "some cached"})
    assert report.backward_passes == passes
    assert report.formula_read_bytes == expected.read
    assert report.formula_written_bytes == expected.written
    assert report.step_read_bytes == expected.read
    assert report.step_written_bytes == expected.written


@pytest.mark.parametrize("room", ["all on NVMe", "half cached"])
@pytest.mark.parametrize("make", [_trained, _half_frozen])
def test_overlapping_transfers_move_what_the_formula_has_but_for_weights_in_the_arena(
    make: Make, room: str, nvme: Path
) -> None:
    moved, expected, _ = _steady_step(make, nvme, dtype=None, room=room, passes=2, overlap=True)
    assert replace(moved, weights_read=0) == replace(expected, weights_read=0)
    missed = expected.weights_read - expected.weights_kept
    most = expected.weights_read + 2 * expected.weights_kept
    spared = expected.weights_written
    assert missed - spared <= moved.weights_read <= most


def test_everything_in_memory_moves_nothing(nvme: Path) -> None:
    model = seeded(_trained)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        for step in range(5):
            vector_loss(model, step).backward()
            offloaded.step()
        report = offloaded.report()
    assert report.step_read_bytes == report.formula_read_bytes == 0
    assert report.step_written_bytes == report.formula_written_bytes == 0


def test_the_plan_has_the_figures_of_the_run(nvme: Path) -> None:
    least = least_budget(_trained, nvme)
    plan = infinity.plan(_trained(), host_memory=least)
    _, expected, _ = _steady_step(
        _trained, nvme, dtype=None, room="all on NVMe", passes=1, overlap=False
    )
    assert plan.read_bytes_per_step == expected.read
    assert plan.written_bytes_per_step == expected.written


def test_the_report_tells_moved_beside_formula_and_wear(nvme: Path) -> None:
    _, expected, report = _steady_step(
        _trained, nvme, dtype=None, room="half cached", passes=1, overlap=False
    )
    lines = dict(line.split("  ", 1) for line in str(report).splitlines() if "  " in line)
    size = format_bytes(expected.read)
    assert lines["read per step, moved / formula"].strip() == f"{size} / {size}"
    assert "% of the rating" in lines["written per day"]
    assert report.wear.written_bytes_per_step == expected.written
    assert report.seconds_per_step is not None
    assert report.wear.written_bytes_per_day == pytest.approx(
        expected.written * 86400 / report.seconds_per_step
    )


def _by_purpose(moved: dict[tuple[str, str], int], kept: int) -> Traffic:
    return Traffic(
        state_read=moved.get(("read", "state"), 0),
        state_written=moved.get(("write", "state"), 0),
        gradients_read=moved.get(("read", "gradients"), 0),
        gradients_written=moved.get(("write", "gradients"), 0),
        weights_read=moved.get(("read", "weights"), 0),
        weights_written=moved.get(("write", "weights"), 0),
        weights_kept=kept,
    )


def test_wear_is_what_is_written_over_what_the_drives_are_rated_for() -> None:
    wear = Wear(
        written_bytes_per_step=10**9,
        seconds_per_step=2.0,
        endurance_bytes=endurance_of("600TB", 2),
    )
    assert wear.endurance_bytes == 1200 * 10**12
    assert wear.written_bytes_per_day == 43200 * 10**9
    assert wear.share_per_day == pytest.approx(0.036)
    assert wear.steps == 1_200_000
    assert dict(wear.rows())["written per day"].endswith("3.60% of the rating")


def test_wear_of_nothing_written_lasts_forever_and_of_unknown_speed_has_no_day() -> None:
    nothing = Wear(written_bytes_per_step=0, seconds_per_step=1.0, endurance_bytes=1)
    assert nothing.steps == float("inf")
    assert nothing.share_per_day == 0.0
    unknown = replace(nothing, seconds_per_step=None)
    assert unknown.written_bytes_per_day is None
    assert [name for name, _ in unknown.rows()] == ["steps within the drives' rating"]


def test_a_plan_takes_the_longer_of_computing_and_moving_for_a_step(nvme: Path) -> None:
    least = least_budget(_trained, nvme)
    for compute in (1e-9, 1e6):
        plan = infinity.plan(
            _trained(),
            nvme,
            host_memory=least,
            compute_seconds=compute,
            drive_endurance="300TB",
        )
        assert plan.io_seconds_per_step is not None
        assert plan.seconds_per_step == max(compute, plan.io_seconds_per_step)
        assert plan.wear.endurance_bytes == 300 * 10**12
        assert plan.steps_within(300 * 10**12) == plan.wear.steps
        assert "written per day" in str(plan)
    assert infinity.plan(_trained(), host_memory=least).wear.share_per_day is None


@pytest.mark.parametrize("endurance", ["many", 0, -5])
def test_an_endurance_that_is_no_size_is_refused(endurance: int | str) -> None:
    with pytest.raises(ValueError, match="drive_endurance="):
        infinity.plan(10**9, host_memory="64GiB", drive_endurance=endurance)


@pytest.mark.parametrize("make", [_trained, _half_frozen])
@pytest.mark.parametrize("room", [0, 2 << 20])
def test_passes_of_inference_read_what_plan_and_report_have_and_write_nothing(
    make: Make, room: int, nvme: Path
) -> None:
    budget = least_budget(make, nvme, optimizer=None) + room
    plan = infinity.plan(make(), optimizer=None, host_memory=budget, passes=3)
    assert plan.passes == plan.written_bytes_per_step == 0
    assert plan.read_bytes_per_step > 0
    model = seeded(make)
    with infinity.offload(model, nvme, optimizer=None, host_memory=budget) as offloaded:
        with torch.no_grad():
            for number in range(16):
                model(vectors(number))
        report = offloaded.report()
        arena = offloaded._training.state.placement.arena_bytes
    assert report.formula_read_bytes == plan.read_bytes_per_step
    assert report.formula_written_bytes == report.step_written_bytes == 0
    assert report.step_read_bytes == pytest.approx(plan.read_bytes_per_step, abs=arena)
    for text in (str(plan), str(report)):
        assert "per pass" in text
        assert "per step" not in text
        assert "rating" not in text


def test_passes_of_inference_read_nothing_where_memory_has_room_for_all_weights(
    nvme: Path,
) -> None:
    """There are no gradients to be kept there."""
    weights = sum(p.numel() * p.element_size() for p in _trained().parameters())
    budget = least_budget(_trained, nvme, optimizer=None) + weights + (1 << 20)
    plan = infinity.plan(_trained(), optimizer=None, host_memory=budget)
    assert plan.read_bytes_per_step == 0
    model = seeded(_trained)
    with infinity.offload(model, nvme, optimizer=None, host_memory=budget) as offloaded:
        with torch.no_grad():
            for number in range(6):
                model(vectors(number))
        assert offloaded.report().step_read_bytes == 0
        vector_loss(model, 0).backward()  # gradients there may be all the same
        gradients = [offloaded.gradient(parameter) for parameter in model.parameters()]
    expected = seeded(_trained)
    vector_loss(expected, 0).backward()
    for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_passes_of_inference_read_nothing_where_what_is_on_nvme_fits_where_it_is_computed_with(
    nvme: Path,
) -> None:
    """The plan had all of it in each pass."""
    weights = sum(p.numel() * p.element_size() for p in _trained().parameters())
    least = least_budget(_trained, nvme, optimizer=None)
    budgets = [least + weights * tenths // 10 for tenths in range(11)]
    plans = [infinity.plan(_trained(), optimizer=None, host_memory=b) for b in budgets]
    fitting = [b for b, p in zip(budgets, plans, strict=True) if not p.read_bytes_per_step]
    model = seeded(_trained)
    with infinity.offload(model, nvme, optimizer=None, host_memory=fitting[0]) as offloaded:
        placement = offloaded._training.state.placement
        assert any(not unit.always_on_host for unit in placement.units_on_nvme)
        with torch.no_grad():
            model(vectors(0))
            offloaded.flush()
            before = sum(offloaded._training.state.timeline.moved.values())
            for number in range(3):
                model(vectors(number))
        assert sum(offloaded._training.state.timeline.moved.values()) == before > 0
        assert offloaded.report().formula_read_bytes == 0
