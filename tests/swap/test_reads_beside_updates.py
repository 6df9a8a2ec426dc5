"""Weights that another thread reads as a step is taken: what they are read from stays until they
have come.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from errno import EIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from aio import AioError
from swap.cache import eviction
from swap.cache.arena import Entry
from swap.cache.eviction import wait_for
from swap.plan.layout import PIECE, pack
from swap.update.stages import Job, Step
from tests.support.tiers import (
    TieredRig,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    same_bits,
    specs_of,
    step_both,
)

NUM = 4
LAST = NUM - 1
"""The backward pass begins with it, and so does an update ahead of its step."""
_SECONDS = 20.0


class _Reader:
    """A thread that has asked for weights, and computes with them when it is let go on."""

    def __init__(self, rig: TieredRig) -> None:
        self._weights = rig.state.weights
        self._finish = self._weights._finish_reading
        self._began, self._go_on = threading.Event(), threading.Event()
        self._thread = -1
        self.entry: Entry | None = None

    def has_come(self) -> bool:
        assert self.entry is not None
        return self.entry.finished_reading()

    @contextmanager
    def reading(self, parameter: int) -> Iterator[Future[torch.Tensor]]:
        with (
            ThreadPoolExecutor(1) as pool,
            patch.object(self._weights, "_finish_reading", self._wait),
        ):
            values = pool.submit(self._read, parameter)
            assert self._began.wait(_SECONDS)
            try:
                yield values
            finally:
                self._go_on.set()

    def _read(self, parameter: int) -> torch.Tensor:
        self._thread = threading.get_ident()
        try:
            return self._weights.acquire([parameter], "reader")[0].clone()
        finally:
            self._weights.release("reader")

    def _wait(self, entry: Entry) -> None:
        if threading.get_ident() == self._thread:
            self.entry = entry
            self._began.set()
            assert self._go_on.wait(_SECONDS)
        self._finish(entry)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TieredRig]:
    with ExitStack() as stack:
        layout = pack(specs_of([PIECE] * NUM), PIECE)
        rig = TieredRig(stack, tmp_path, placement_of(layout, arena_bytes=4 * NUM * PIECE))
        fill_both(rig.state, rig.plain)
        yield rig


def _passes(rig: TieredRig, number: int) -> None:
    for parameter in range(NUM):
        _use(rig, parameter)
    for parameter in reversed(range(NUM)):
        _use(rig, parameter)
        add_to_both(rig.state, rig.plain, parameter, seed=10 * number + parameter)


def _use(rig: TieredRig, parameter: int) -> None:
    (weight,) = rig.state.weights.acquire([parameter], "test")
    assert same_bits(weight, rig.plain.weight(parameter))
    rig.state.weights.release("test")


def _nothing_moves_by_itself(rig: TieredRig) -> None:
    """Transfers are carried out as they are waited for, and nothing is cached."""
    rig.engine.carry_out_all()
    rig.engine.eager = 0.0
    rig.state.weights.drop()


def test_weights_read_beside_a_step_that_was_computed_before_are_those_from_before(
    rig: TieredRig,
) -> None:
    rig.state.speculation.expect_step = lambda: Step(
        updates=rig.plain.updates(range(NUM)), gradient_scale=1.0
    )
    _passes(rig, 0)
    step_both(rig.state, rig.plain, range(NUM))
    rig.state.flush()
    is_written, stages = threading.Event(), rig.state.stages
    finish = stages.finish_write

    def noted(job: Job) -> None:
        finish(job)
        if job.subgroup.index == LAST:
            is_written.set()

    with patch.object(stages, "finish_write", noted):
        _passes(rig, 1)
        assert is_written.wait(_SECONDS)
    before, reader = rig.plain.weight(LAST).clone(), _Reader(rig)
    _nothing_moves_by_itself(rig)
    with reader.reading(LAST) as values:
        assert not reader.has_come()
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
        assert reader.has_come(), "what it is read from may have other values now"
    assert same_bits(values.result(), before)
    assert_same(rig.state, rig.plain)


def test_weights_read_beside_a_step_that_fails_and_is_finished_are_those_from_before(
    rig: TieredRig,
) -> None:
    _passes(rig, 0)
    before, reader = rig.plain.weight(LAST).clone(), _Reader(rig)
    _nothing_moves_by_itself(rig)
    with reader.reading(LAST) as values:
        rig.faults.arm("read", EIO)  # of the first subgroup that is updated
        step_both(rig.state, rig.plain, range(NUM))
        with pytest.raises(AioError):
            rig.state.pipeline.wait()
        rig.state.flush()
        assert reader.has_come(), "what it is read from may have other values now"
    assert same_bits(values.result(), before)
    assert_same(rig.state, rig.plain)


def test_weights_that_leave_as_another_thread_reads_them_are_known_until_they_have_come(
    rig: TieredRig,
) -> None:
    """Or an update would not wait for that before it lets go of what they are read from."""
    weights, known = rig.state.weights, []
    reader = _Reader(rig)
    _nothing_moves_by_itself(rig)
    with reader.reading(LAST) as values:

        def noted(entry: Entry) -> bool:
            known.append(weights._stale.get(LAST) is entry)
            return wait_for(entry)

        with weights._lock, patch.object(eviction, "wait_for", noted):
            weights._cached.outdate(LAST, is_read=True)
            assert weights._cached._evict_one(None)
        assert weights._stale == {}
    assert known == [True]
    assert same_bits(values.result(), rig.plain.weight(LAST))
