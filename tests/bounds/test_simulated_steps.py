"""Steps in simulated time: the library's schedule over hardware that only takes time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import simulate_steps
from simulation.model import Llama
from simulation.running import LEARNING, Machine, simulate

from swap.tiers import Budget

GIB = 1 << 30
SMALL = Llama(layers=2)
TOKENS = 32768


def test_a_step_whose_update_takes_nothing_takes_what_computing_does() -> None:
    budget = Budget(host_bytes=40 * GIB, device_bytes=8 * GIB)
    machine = Machine(adam=1e18, link=1e18)
    outcome = simulate(SMALL, machine, budget, tokens=TOKENS, steps=LEARNING + 1)
    assert outcome.read == outcome.written == 0
    assert outcome.step == pytest.approx(outcome.compute, rel=0.01)


def test_updates_of_state_in_host_memory_hide_behind_the_backward_pass() -> None:
    budgets = [Budget(host_bytes=host * GIB, device_bytes=8 * GIB) for host in (40, 11)]
    with_spares, without = (
        simulate(SMALL, Machine(), budget, tokens=TOKENS, steps=5) for budget in budgets
    )
    assert with_spares.disk == without.disk == 0
    assert with_spares.compute < with_spares.step < without.step
    assert with_spares.seen_of_update < without.seen_of_update


def test_a_step_with_state_on_nvme_takes_what_the_disks_do() -> None:
    """And not much longer: of two layers the ends, at which disks are idle, are a large part."""
    budget = Budget(host_bytes=3 * GIB, device_bytes=8 * GIB)
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
