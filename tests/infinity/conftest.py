"""A directory for swap files that must be empty again after every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Where state is offloaded to; whatever a test does, nothing may stay in it."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    yield directory
    assert list(directory.rglob("*")) == []
