"""Steps behind training give the bits of plain tensors in whatever order threads go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.interleaved_steps import run_seed

_USUAL = 6
_PROOF_SECONDS = 75.0


def _run(seeds: range, folder: Path, seconds: float) -> tuple[int, int]:
    """How many seeds were run in that time, and how often threads were held back."""
    end, held = time.monotonic() + seconds, 0
    for count, seed in enumerate(seeds):
        if time.monotonic() > end:
            return count, held
        place = folder / str(seed)
        place.mkdir()
        try:
            held += run_seed(seed, place)
        except BaseException as error:
            error.add_note(f"the seed was {seed}")
            raise
        place.rmdir()
    return len(seeds), held


def test_steps_whose_threads_are_held_back_have_the_same_bits(tmp_path: Path) -> None:
    assert _run(range(_USUAL), tmp_path, 60.0)[1] > 0


@pytest.mark.proof
def test_steps_in_very_many_orders_have_the_same_bits(tmp_path: Path) -> None:
    count, held = _run(range(1000, 1_000_000), tmp_path, _PROOF_SECONDS)
    assert count > 10
    assert held > 100 * count
