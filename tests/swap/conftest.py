"""What several tests of tiers begin with."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from swap.device.visits import Visits


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test opens; it is closed behind it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of visits that were begun."""
    noted: list[int] = []
    begin = Visits.begin

    def begin_and_note(visits: Visits, visit: Any, *rest: Any) -> None:
        noted.append(visit.elements)
        begin(visits, visit, *rest)

    monkeypatch.setattr(Visits, "begin", begin_and_note)
    return noted
