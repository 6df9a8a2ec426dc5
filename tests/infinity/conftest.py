"""A directory for swap files that must be empty again after every test, and quiet computing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """Where state is offloaded to; whatever a test does, nothing may stay in it."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    yield directory
    assert list(directory.rglob("*")) == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models compute faster so, when tests share a machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
