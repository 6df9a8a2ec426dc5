"""Ctrl-C at any line of what a run does: it goes on with the same bits, and nothing is left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.interrupted_runs import (
    ACTIONS,
    CRITICAL_ACTIONS,
    Blocks,
    How,
    Run,
    Scenario,
    running,
)
from tests.support.interrupts import interrupt, interrupt_at_instruction, sampled

Counted = Callable[..., None]
SCENARIOS = [
    Scenario(activations, is_least)
    for activations in ("keep", "host", "nvme")
    for is_least in (True, False)
]


def check(run: Run | Blocks, action: str, wanted: int, seed: int, how: How = interrupt) -> int:
    """How many points were interrupted."""
    lines, wrong = run.interrupted(action, None, how)
    assert wrong == "", action
    numbers = sampled(lines.seen, wanted, seed)
    for number in numbers:
        lines, wrong = run.interrupted(action, number, how)
        assert wrong == "", f"{action} interrupted at {lines.line}, point {number}"
    return len(numbers)


@pytest.mark.timeout(300)
def test_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with running(Scenario("nvme", is_least=True), tmp_path) as run:
        for action in ("spill", "step"):
            check(run, action, 1, seed=1)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_run_interrupted_at_many_lines_goes_on_with_the_same_bits(
    scenario: Scenario, action: str, tmp_path: Path, counted: Counted
) -> None:
    with running(scenario, tmp_path) as run:
        cell = SCENARIOS.index(scenario) * len(ACTIONS) + ACTIONS.index(action)
        counted("interrupts", lines=check(run, action, 8, seed=cell))


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ["enter", "exit"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_block_interrupted_at_many_lines_leaves_a_whole_model_and_nothing_else(
    scenario: Scenario, action: str, tmp_path: Path, counted: Counted
) -> None:
    visited = check(Blocks(scenario, tmp_path), action, 8, seed=SCENARIOS.index(scenario))
    counted("interrupts", lines=visited)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ["enter", "exit", *CRITICAL_ACTIONS])
def test_run_interrupted_at_instructions_goes_on_with_the_same_bits(
    action: str, tmp_path: Path, counted: Counted
) -> None:
    scenario, how = Scenario("nvme", is_least=True), interrupt_at_instruction
    if action in ("enter", "exit"):
        visited = check(Blocks(scenario, tmp_path), action, 5, seed=1, how=how)
    else:
        with running(scenario, tmp_path) as run:
            visited = check(run, action, 8, seed=1, how=how)
    counted("interrupts", instructions=visited)
