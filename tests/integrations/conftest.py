"""Tests of frameworks run by themselves (``make test-frameworks``): importing some takes long."""

from collections.abc import Iterator
from pathlib import Path

import pytest

_OF_OTHERS = (".*gradient_checkpointing.*:FutureWarning",)
"""Warnings that frameworks give each other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            for warning in _OF_OTHERS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Where state is offloaded to; whatever a test does, nothing may stay in it."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    yield directory
    assert list(directory.rglob("*")) == []
