"""Rows of the tables in docs/COMPATIBILITY.md, each written there as the test found it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "COMPATIBILITY.md"


def row(name: str, package: str, *, least_bytes: int, state_bytes: int) -> str:
    """Of something that gave the bits of the same in memory with so little of its state there."""
    part = round(100 * least_bytes / state_bytes)
    assert part < 90, f"{part} % of the state is no little budget"
    return f"| {name} | {package} {version(package)} | {part} % | yes | yes |"


def assert_documented(expected: str) -> None:
    """The document has this row, and so what it says is what a test has seen."""
    rows = DOCUMENT.read_text().splitlines()
    assert expected in rows, f"docs/COMPATIBILITY.md lacks the row\n{expected}"
