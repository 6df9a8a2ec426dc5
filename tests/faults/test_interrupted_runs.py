"""Ctrl-C at any line of what a run does: it goes on with the same bits, and nothing is left."""

from pathlib import Path

import pytest

from tests.support.interrupted_runs import ACTIONS, Blocks, Run, Scenario, running
from tests.support.interrupts import sampled

SCENARIOS = [
    Scenario(activations, is_least)
    for activations in ("keep", "host", "nvme")
    for is_least in (True, False)
]


def check(run: Run | Blocks, action: str, wanted: int, seed: int) -> None:
    lines, wrong = run.interrupted(action, None)
    assert wrong == "", action
    for number in sampled(lines.seen, wanted, seed):
        lines, wrong = run.interrupted(action, number)
        assert wrong == "", f"{action} interrupted at {lines.line}, line {number}"


@pytest.mark.timeout(300)
def test_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with running(Scenario("nvme", is_least=True), tmp_path) as run:
        for action in ("forward", "backward", "spill", "step", "modify"):
            check(run, action, 1, seed=1)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_run_interrupted_at_many_lines_goes_on_with_the_same_bits(
    scenario: Scenario, action: str, tmp_path: Path
) -> None:
    with running(scenario, tmp_path) as run:
        cell = SCENARIOS.index(scenario) * len(ACTIONS) + ACTIONS.index(action)
        check(run, action, 8, seed=cell)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ["enter", "exit"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_block_interrupted_at_many_lines_leaves_a_whole_model_and_nothing_else(
    scenario: Scenario, action: str, tmp_path: Path
) -> None:
    check(Blocks(scenario, tmp_path), action, 8, seed=SCENARIOS.index(scenario))
