"""Skips are counted by reason, and a reason that nobody allowed fails the run."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.skips import Skips, patterns_in

ALLOWED = Path(__file__).parents[2] / ".ci" / "allowed-skips"


def report(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid="test_x",
        location=("test_x.py", 1, "test_x"),
        keywords={},
        outcome="skipped",
        longrepr=("test_x.py", 1, f"Skipped: {reason}"),
        when="setup",
    )


def status_after(skips: Skips, exitstatus: pytest.ExitCode) -> object:
    session = Mock(exitstatus=exitstatus)
    skips.pytest_sessionfinish(session)
    return session.exitstatus


def test_skips_are_counted_by_their_reason() -> None:
    skips = Skips()
    for reason in ("no disk", "no disk", "no root"):
        skips.pytest_runtest_logreport(report(reason))
    assert skips.reasons == {"no disk": 2, "no root": 1}
    assert skips.refused() == []
    assert status_after(skips, pytest.ExitCode.OK) == pytest.ExitCode.OK


def test_an_expected_failure_is_no_skip() -> None:
    skips = Skips([])
    failed = report("it is known")
    failed.wasxfail = "it is known"
    skips.pytest_runtest_logreport(failed)
    assert not skips.reasons


def test_a_reason_that_is_not_allowed_fails_the_run() -> None:
    skips = Skips(["no disk", "needs * MiB"])
    for reason in ("no disk", "needs 3 MiB", "no diskette"):
        skips.pytest_runtest_logreport(report(reason))
    assert skips.refused() == ["no diskette"]
    assert status_after(skips, pytest.ExitCode.OK) == pytest.ExitCode.TESTS_FAILED
    interrupted = pytest.ExitCode.INTERRUPTED
    assert status_after(skips, interrupted) == interrupted


@pytest.mark.parametrize("reason", ["needs strace", "needs root", "no memory cgroup can be made"])
def test_what_the_environment_has_to_have_is_no_reason(reason: str) -> None:
    skips = Skips(patterns_in(ALLOWED))
    skips.pytest_runtest_logreport(report(reason))
    assert skips.refused() == [reason]
