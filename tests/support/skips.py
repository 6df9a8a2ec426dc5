"""Counts the tests that are skipped by the reason given, and fails a run with a reason that nobody
has allowed.

A plugin of pytest. With ``--allowed-skips FILE`` a reason has to match one of the lines of that
file (patterns of fnmatch; empty lines and those that begin with ``#`` are passed over).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

_NAME = "skips by reason"


class Skips:
    """What was skipped so far. ``allowed`` are patterns; without them every reason will do."""

    def __init__(self, allowed: Iterable[str] | None = None) -> None:
        self._allowed = None if allowed is None else list(allowed)
        self.reasons: Counter[str] = Counter()

    def refused(self) -> list[str]:
        """Reasons that were given and are not allowed."""
        if self._allowed is None:
            return []
        return sorted(
            reason
            for reason in self.reasons
            if not any(fnmatchcase(reason, pattern) for pattern in self._allowed)
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.reasons[_reason(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reasons[_reason(report)] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused() and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.reasons:
            terminalreporter.section("skipped, by reason")
        refused = self.refused()
        for reason, count in sorted(self.reasons.items()):
            note = "  NOT ALLOWED" if reason in refused else ""
            terminalreporter.write_line(f"{count:5}  {reason}{note}", red=bool(note))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """As it was given to ``pytest.skip`` or to a mark."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def patterns_in(file: Path) -> list[str]:
    """The patterns that a file of allowed reasons lists."""
    lines = (line.strip() for line in file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="fail where a test is skipped for a reason that matches no pattern in FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker of xdist, which reports to a run that counts
        return
    file = config.getoption("--allowed-skips")
    if file is not None and not file.is_file():
        raise pytest.UsageError(f"--allowed-skips: there is no file {file}")
    config.pluginmanager.register(Skips(None if file is None else patterns_in(file)), _NAME)
