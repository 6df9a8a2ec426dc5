"""What every test on a GPU needs."""

import os
from collections.abc import Iterator

import pytest

from tests.support.device_runs import deterministic

# Read with the first product: torch refuses those of cuBLAS without, where all has to be the same.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def same_every_time() -> Iterator[None]:
    """Two runs on a device have the same bits."""
    with deterministic():
        yield
