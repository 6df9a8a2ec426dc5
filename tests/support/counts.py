"""What tests counted, in one summary at the end of a run: seeds, states, inputs, kills.

A test says ``counted("interleavings", seeds=600)``; the sums of all tests are printed by name. With
``--counts FILE`` they are added to what is in that file, so that several runs give one summary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

_KEY = "counted"


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes a kind of proof, and numbers by name."""

    def count(kind: str, **numbers: int) -> None:
        for name, number in numbers.items():
            request.node.user_properties.append((_KEY, [kind, name, number]))

    return count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts", metavar="FILE", help="add what tests counted to FILE")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if hasattr(config, "workerinput"):  # a worker of xdist, which reports to a run that counts
        return
    sums = _sums(terminalreporter)
    file = config.getoption("--counts")
    if file is not None:
        sums = _added(Path(file), sums)
    if sums:
        terminalreporter.section("counts")
    for kind, numbers in sorted(sums.items()):
        told = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
        terminalreporter.write_line(f"{kind}: {told}".replace("_", " "))


def _sums(reporter: pytest.TerminalReporter) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for reports in reporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for key, value in report.user_properties:
                if key == _KEY:
                    kind, name, number = value
                    sums.setdefault(kind, Counter())[name] += number
    return sums


def _added(file: Path, sums: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    if file.exists():
        for kind, numbers in json.loads(file.read_text()).items():
            sums[kind] = Counter(numbers) + sums.get(kind, Counter())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(sums))
    return sums
