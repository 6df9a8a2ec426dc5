"""A disk that is really full: a small ext4 of its own under the swap files."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aio import AioError
from swap.plan.layout import pack
from swap.plan.placement import Placement
from swap.tiered import TieredState
from swap.update.stages import Step
from tests.support.aio_loop import loop_mount, unavailable_reason
from tests.support.tiers import (
    RULE,
    Leftovers,
    Plain,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    specs_of,
    step_both,
)

MIB = 1 << 20
SPECS = specs_of([1 << 16] * 40)
REASON = unavailable_reason()

pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture
def placement() -> Placement:
    return placement_of(pack(SPECS, 1 << 16), arena_bytes=4 * MIB, spill_chunk_bytes=MIB)


@pytest.fixture
def small_disk(placement: Placement) -> Iterator[Path]:
    """With room for the swap file, what ext4 keeps for itself, and little more."""
    with loop_mount(placement.nvme_bytes + 12 * MIB) as mounted:
        yield mounted


def test_swap_files_that_do_not_fit_are_refused_before_anything_is_changed(
    small_disk: Path, placement: Placement
) -> None:
    (small_disk / "others").write_bytes(bytes(16 * MIB))
    before = Leftovers.of(small_disk)
    with pytest.raises(AioError, match=r"allocate .* No space left on device") as caught:
        TieredState(placement, RULE, [small_disk])
    assert caught.value.filename is not None
    assert Leftovers.of(small_disk) == before


def test_training_fits_into_what_was_planned(small_disk: Path, placement: Placement) -> None:
    state, plain = TieredState(placement, RULE, [small_disk]), Plain(SPECS)
    try:
        fill_both(state, plain)
        for step in range(4):
            for spec in SPECS:
                add_to_both(state, plain, spec.index, seed=100 * step + spec.index)
            step_both(state, plain, range(len(SPECS)))
            state.flush()
            assert state.extents is not None
            assert state.extents.peak_bytes <= placement.nvme_bytes
        assert_same(state, plain)
    finally:
        state.close()


def _wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_speculative_updates_that_find_the_disk_full_are_done_without(
    small_disk: Path, placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    """They write all new components before any old one is released: twice the space."""
    state, plain = TieredState(placement, RULE, [small_disk]), Plain(SPECS)
    everything = range(len(SPECS))
    state.speculation.expect_step = lambda: Step(
        updates=plain.updates(everything), gradient_scale=1.0
    )
    try:
        fill_both(state, plain)
        with caplog.at_level(logging.WARNING, logger="swap"):
            for step in range(4):
                state.pipeline.wait()  # or nothing might be speculative
                for spec in reversed(SPECS):
                    add_to_both(state, plain, spec.index, seed=100 * step + spec.index)
                if step == 1:  # the first that has a step to learn from
                    _wait_until(lambda: state.pipeline.speculation_failure is not None)
                step_both(state, plain, everything)
        assert_same(state, plain)
        (record,) = caplog.records
        assert "No space left on device" in record.getMessage()
        assert state.speculation.expect_step is None
    finally:
        state.close()
