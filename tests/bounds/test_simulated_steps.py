"""Steps in simulated time: the library's schedule over hardware that only takes time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import simulate_steps
from simulation.model import Llama
from simulation.running import LEARNING, Machine, simulate

from swap.plan import spares
from swap.tiers import Budget

GIB = 1 << 30
SMALL = Llama(layers=2)
TOKENS = 32768
WEIGHTS = 7 * GIB // 4
"""Of device memory: room for all weights, and none for state."""


def test_a_step_whose_update_takes_nothing_takes_what_computing_does() -> None:
    budget = Budget(host_bytes=40 * GIB, device_bytes=8 * GIB)
    machine = Machine(adam=1e18, link=1e18, memory=1e18)
    outcome = simulate(SMALL, machine, budget, tokens=TOKENS, steps=LEARNING + 1)
    assert outcome.read == outcome.written == 0
    assert outcome.step == pytest.approx(outcome.compute, rel=0.01)


def test_updates_of_state_in_host_memory_hide_behind_the_backward_pass() -> None:
    budgets = [Budget(host_bytes=host * GIB, device_bytes=WEIGHTS) for host in (40, 11)]
    with_spares, without = (
        simulate(SMALL, Machine(), budget, tokens=TOKENS, steps=5) for budget in budgets
    )
    assert with_spares.disk == without.disk == 0
    assert with_spares.compute < with_spares.step < without.step
    assert with_spares.seen_of_update < without.seen_of_update


def test_what_is_at_home_on_the_device_is_updated_at_the_speed_of_its_memory() -> None:
    """All of it here: nothing is moved over links, and what is seen is the device's own work."""
    budget, memory = Budget(host_bytes=40 * GIB, device_bytes=24 * GIB), 1e12
    given = {"tokens": TOKENS, "steps": LEARNING + 1}
    outcome = simulate(SMALL, Machine(link=1.0, memory=memory), budget, **given)
    kernel = 26 * SMALL.num_parameters / memory  # reads 14 bytes and writes 12
    kept = 3 * 2 * SMALL.num_parameters / memory  # gradients: copied, read for the norm
    assert outcome.update == pytest.approx(kernel, rel=0.01)
    assert outcome.step == pytest.approx(outcome.compute + kernel + kept, rel=0.01)


def test_state_on_a_device_takes_the_end_of_the_update_away() -> None:
    """The planner has what is used first there, whose gradients come last."""
    budgets = [Budget(host_bytes=40 * GIB, device_bytes=device) for device in (WEIGHTS, 6 * GIB)]
    without, on_device = (
        simulate(SMALL, Machine(), budget, tokens=TOKENS, steps=LEARNING + 1) for budget in budgets
    )
    assert without.update == pytest.approx(SMALL.num_parameters / Machine().adam, rel=0.01)
    assert on_device.update < without.update
    assert on_device.step - on_device.compute < (without.step - without.compute) / 2


def test_updates_are_hidden_where_what_is_used_first_is_at_home_on_the_device() -> None:
    """The program is ahead of the device as the step is taken: nothing of it waits for that."""
    budget = Budget(host_bytes=60 * GIB, device_bytes=8 * GIB)
    outcome = simulate(Llama(layers=8), Machine(), budget, tokens=TOKENS, steps=4)
    assert outcome.seen_of_update < 0.02


@pytest.mark.proof
@pytest.mark.parametrize(("link", "most"), [(50e9, 0.75), (6e9, 1.03)])
def test_a_device_updates_for_processors_that_are_behind_where_that_is_sooner(
    monkeypatch: pytest.MonkeyPatch, link: float, most: float
) -> None:
    """And a link that is slow does not make it later."""
    budget = Budget(host_bytes=60 * GIB, device_bytes=8 * GIB)
    machine, given = Machine(adam=1e9, link=link), {"tokens": 8192, "steps": LEARNING + 2}
    visiting = simulate(Llama(layers=6), machine, budget, **given)
    monkeypatch.setattr(spares, "_VISIT_SHARE", 0.0)
    without = simulate(Llama(layers=6), machine, budget, **given)
    assert visiting.step < most * without.step


def test_disks_do_not_stand_still_for_a_device_that_is_behind() -> None:
    """New weights wait for memory of old ones, with which the device has still to compute."""
    budget = Budget(host_bytes=3 * GIB, device_bytes=6 * GIB)
    outcome = simulate(SMALL, Machine(), budget, tokens=2 * TOKENS, steps=4)
    assert outcome.disk > 0
    assert outcome.over_the_larger < 1.1


@pytest.mark.proof
def test_a_step_with_state_on_nvme_takes_what_the_disks_do() -> None:
    """And not much longer: of two layers the ends, at which disks are idle, are a large part."""
    budget = Budget(host_bytes=3 * GIB, device_bytes=WEIGHTS)
    outcome = simulate(SMALL, Machine(), budget, tokens=TOKENS, steps=5)
    assert outcome.written >= 10 * SMALL.num_parameters
    assert outcome.disk > outcome.compute
    assert 0.95 < outcome.over_the_larger < 1.35


def test_rows_are_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_steps, "Llama", lambda: SMALL)
    out = tmp_path / "steps.json"
    given = ["--state", "host", "--tokens", "8192", "--steps", "1", "--json", str(out)]
    simulate_steps.main(given)
    assert "8,192" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["state"], row["tokens"], row["written"]) == ("host", 8192, 0)
    assert row["steps"][-1] >= row["compute"]
