"""What is proposed, validated and rolled back, over a pipeline that only takes note."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from swap.plan.layout import Layout, Subgroup, pack
from swap.update.speculation import Speculation
from swap.update.stages import Step
from tests.support.tiers import Plain, specs_of

SIZES = [4096, 4096, 4096]
LAST = len(SIZES) - 1
"""In memory without a spare block: it cannot keep what was there, and waits for the step."""


@dataclass
class Noted:
    """An ``UpdatePipeline`` that is always idle and does nothing."""

    is_idle: bool = True
    can_validate: bool = True
    speculation_failure: BaseException | None = None
    calls: list[Any] = field(default_factory=list)

    def speculate(self, step: Step) -> None:
        self.calls.append("speculate")

    def feed(self, groups: Sequence[Subgroup]) -> None:
        self.calls.append([group.index for group in groups])

    def roll_back(self) -> None:
        """Nothing where no pass is open."""
        opened = [call for call in self.calls if call in ("speculate", "roll back")]
        if opened[-1:] == ["speculate"]:
            self.calls.append("roll back")

    def validate(self, step: Step, fed: Sequence[Subgroup], rest: Sequence[Subgroup]) -> bool:
        self.calls.append(([group.index for group in fed], [group.index for group in rest]))
        return self.can_validate


class _Components:
    def is_copied_on_write(self, subgroup: int) -> bool:
        return subgroup != LAST


def _layout() -> Layout:
    layout = pack(specs_of(SIZES), max(SIZES))
    assert len(layout.subgroups) == len(SIZES)
    return layout


def _step(scale: float = 1.0) -> Step:
    return Step(updates=Plain(specs_of(SIZES)).updates(range(len(SIZES))), gradient_scale=scale)


def _learned(noted: Noted, *, overlap: bool = True) -> tuple[Speculation, Layout]:
    """After a step in which every parameter got one gradient."""
    layout = _layout()
    made = Speculation(layout, cast(Any, _Components()), cast(Any, noted), overlap=overlap)
    made.expect_step = _step
    _add(made, 0, 1, 2)
    _take(made, layout, _step())
    assert noted.calls == [], "there was nothing to learn from"
    return made, layout


def _add(speculation: Speculation, *parameters: int) -> None:
    for parameter in parameters:
        speculation.begin_adding(parameter)
        speculation.arrived(parameter)
        speculation.end_adding()


def _take(speculation: Speculation, layout: Layout, step: Step) -> bool:
    done = speculation.done_for(step)
    if not done:
        speculation.roll_back()
    speculation.taken()
    is_validated = speculation.validate(step, done, layout.subgroups)
    speculation.end()
    return is_validated


def test_what_is_done_for_the_step_that_is_taken_is_validated() -> None:
    noted = Noted()
    speculation, layout = _learned(noted)
    _add(speculation, 2, 1, 0)
    assert _take(speculation, layout, _step())
    assert noted.calls == ["speculate", [1], [0], ([1, 0], [2])]
    assert speculation.backward_passes == 1


def test_what_is_done_for_another_step_is_rolled_back() -> None:
    noted = Noted()
    speculation, layout = _learned(noted)
    _add(speculation, 0)
    assert not _take(speculation, layout, _step(scale=0.5))
    assert noted.calls == ["speculate", [0], "roll back"]
    _add(speculation, 0)
    assert noted.calls[3:] == ["speculate", [0]], "the next step is proposed anew"


def test_a_parameter_without_a_gradient_is_expected_to_have_none_again() -> None:
    """What is unused changes nothing of the step that the others are updated for."""
    noted, layout = Noted(), pack(specs_of([4096, 4096]), 3 * 4096)
    assert len(layout.subgroups) == 1
    speculation = Speculation(layout, cast(Any, _Components()), cast(Any, noted), overlap=True)
    updates = Plain(specs_of([4096, 4096])).updates(range(2))
    speculation.expect_step = lambda: Step(updates=updates, gradient_scale=1.0)
    taken = Step(updates={0: updates[0]}, gradient_scale=1.0)
    for _ in range(2):
        _add(speculation, 0)
        is_validated = _take(speculation, layout, taken)
    assert is_validated
    assert noted.calls == ["speculate", [0], ([0], [])]


def test_while_the_step_before_is_under_way_complete_subgroups_wait() -> None:
    noted = Noted()
    speculation, _ = _learned(noted)
    noted.is_idle = False
    _add(speculation, 0)
    assert noted.calls == []
    noted.is_idle = True
    _add(speculation, 1)
    assert noted.calls == ["speculate", [0, 1]]


def test_a_gradient_more_than_expected_is_a_surplus_and_so_is_any_after_an_error() -> None:
    speculation, _ = _learned(Noted())
    assert not speculation.is_surplus(0)
    _add(speculation, 0)
    assert speculation.is_surplus(0)
    assert not speculation.is_surplus(1)
    speculation.begin_adding(1)  # and an error before it has ended
    assert speculation.is_surplus(2)
    assert speculation.done_for(_step()) == []


def test_an_error_of_the_speculative_pass_turns_speculation_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted = Noted(can_validate=False, speculation_failure=OSError("no room"))
    speculation, layout = _learned(noted)
    _add(speculation, 0)
    with caplog.at_level(logging.WARNING):
        assert not _take(speculation, layout, _step())
    assert "no room" in caplog.text
    noted.calls.clear()
    _add(speculation, 0, 1, 2)
    assert noted.calls == []


@pytest.mark.parametrize("overlap", [True, False])
def test_cleared_gradients_are_forgotten_and_without_overlap_nothing_begins(overlap: bool) -> None:
    noted = Noted()
    speculation, _ = _learned(noted, overlap=overlap)
    _add(speculation, 0)
    speculation.roll_back()
    speculation.cleared()
    assert noted.calls == (["speculate", [0], "roll back"] if overlap else [])
    assert not speculation.is_surplus(0)


def test_what_another_thread_rolls_back_as_it_is_fed_is_not_taken_for_done() -> None:
    """A subgroup that no pass has would be left as it is by the step."""
    specs, noted = specs_of([4096] * 4), Noted()
    layout = pack(specs, 4096)
    made = Speculation(layout, cast(Any, _Components()), cast(Any, noted), overlap=True)
    step = Step(updates=Plain(specs).updates(range(4)), gradient_scale=1.0)
    made.expect_step = lambda: step
    _add(made, 0, 1, 2, 3)
    _take(made, layout, step)
    _add(made, 0)
    undoing = threading.Thread(target=made.roll_back)
    is_undoing, is_feeding = threading.Event(), threading.Event()
    fed: list[int] = []

    def roll_back() -> None:
        is_undoing.set()
        is_feeding.wait(0.5)

    def feed(groups: Sequence[Subgroup]) -> None:
        if undoing.is_alive():  # into the pass that is being rolled back: it takes nothing
            is_feeding.set()
            undoing.join()
        else:
            fed.extend(group.index for group in groups)

    noted.roll_back, noted.feed = roll_back, feed  # type: ignore[method-assign]
    undoing.start()
    is_undoing.wait()
    _add(made, 1, 3, 2)
    undoing.join()
    assert _take(made, layout, step)
    assert noted.calls[-1] == (fed, [index for index in range(4) if index not in fed])


def test_speculation_goes_on_after_another_thread_rolled_it_back_as_the_step_was_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted = Noted(can_validate=False)
    speculation, layout = _learned(noted)
    _add(speculation, 0, 1, 2)
    done = speculation.done_for(_step())
    speculation.roll_back()
    with caplog.at_level(logging.WARNING):
        assert not speculation.validate(_step(), done, layout.subgroups)
    assert not caplog.records
    assert speculation.expect_step is not None


def test_what_a_handler_rolls_back_as_a_pass_is_opened_is_gone_with_the_next() -> None:
    """It came when nothing was open; then the pass is, and holds nothing that a step asks for."""

    class Interrupted(Noted):
        def speculate(self, step: Step) -> None:
            speculation.roll_back()
            super().speculate(step)

    noted = Interrupted()
    speculation, layout = _learned(noted)
    _add(speculation, 0)
    assert noted.calls[:1] == ["speculate"]
    speculation.roll_back()
    assert noted.calls[-1] == "roll back"
    assert _take(speculation, layout, _step()) is False


def test_speculation_ends_while_a_gradient_arrives() -> None:
    """On the thread of the inbox, as the block ends."""
    noted = Noted()
    speculation, _ = _learned(noted)

    class Ending:
        """A pipeline that is asked whether it is idle as all this ends."""

        def __getattr__(self, name: str) -> Any:
            speculation.expect_step = None
            return getattr(noted, name)

    speculation._pipeline = cast(Any, Ending())
    _add(speculation, 0)
    assert noted.calls == ["speculate", [0]]
