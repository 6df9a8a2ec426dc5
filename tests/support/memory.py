"""Folders in memory, for tests of what does not depend on a disk: a sync costs nothing there.

What is about durability, faults, direct I/O or interrupts at any line stays on a disk.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


def folder_in_memory() -> Callable[..., Iterator[Path]]:
    """A module's fixture: ``tmp_path = folder_in_memory()``; on disk where there is no such memory.

    Its path has no links in it.
    """

    @pytest.fixture
    def tmp_path() -> Iterator[Path]:
        parent = MEMORY.resolve() if MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="infinity-test-", dir=parent) as folder:
            yield Path(folder).resolve()

    return tmp_path
