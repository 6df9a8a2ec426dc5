"""I/O errors under training: each is raised with its place, and costs a retry and nothing else.

After any error: every subgroup is as it was before the step or as it is after it, in all of its
components; when the disk works again, ``flush`` finishes the step; and what comes out is what comes
out without errors, to the last bit. No slot, extent, descriptor or memory is lost on the way.
"""

import copy
import errno
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aio import AioError
from swap.plan.layout import PIECE, Subgroup, pack
from swap.tiered import TieredState
from swap.update.pipeline import UpdatePipeline
from swap.update.stages import Step
from tests.support.examples import examples
from tests.support.late_engine import Faults, Kind
from tests.support.tiers import (
    RULE,
    Leftovers,
    Plain,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    random_values,
    same_bits,
    specs_of,
)

SIZES = (3 * PIECE + 5, 100, 5 * PIECE, 1, 2 * PIECE, PIECE)
NUM_SLOTS = 3
ERRNOS = {"read": errno.EIO, "write": errno.EIO, "allocate": errno.ENOSPC}


class Training:
    """Training that meets errors, says so, and goes on when the disk works again."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        speculative: bool = False,
        overlap: bool = True,
        **homes: Any,
    ) -> None:
        self.faults = Faults()
        stack.enter_context(late_engines(seed, self.faults))
        self.specs = specs_of(SIZES, dtype)
        layout = pack(self.specs, 2 * PIECE)
        placement = placement_of(layout, arena_bytes=11 * PIECE * 4, num_slots=NUM_SLOTS, **homes)
        self.state = TieredState(placement, RULE, [folder], overlap=overlap)
        stack.callback(self.state.close)
        self.plain = Plain(self.specs)
        fill_both(self.state, self.plain)
        self.before = copy.deepcopy(self.plain.components)
        self.errors: list[AioError] = []
        self.seeds = itertools.count(seed)
        if speculative:
            everything = range(len(SIZES))
            self.state.speculation.expect_step = lambda: Step(
                updates=self.plain.updates(everything), gradient_scale=0.5
            )

    def meet(self, action: Callable[[], Any]) -> Any:
        """Do ``action`` until it works; after an error, mend the disk and finish the step."""
        while True:
            try:
                return action()
            except AioError as error:
                self.errors.append(error.with_traceback(None))
                self.check_error(error)
                self.mend()

    def mend(self) -> None:
        self.faults.disarm()
        for attempt in itertools.count():
            try:
                return self.state.flush()
            except AioError as error:
                # One error of a step, and one for each spill that waits to be written again.
                assert attempt < 20
                self.check_error(error)
                self.check_subgroups()

    def check_error(self, error: AioError) -> None:
        assert error.errno in ERRNOS.values()
        assert error.filename is not None
        assert error.filename.endswith("state.swap")
        assert error.offset is not None
        assert error.filename in str(error)

    def check_subgroups(self) -> None:
        """Each is before or after the step, in every component."""
        for group in self.state.layout.subgroups:
            assert self._is(group, self.before) or self._is(group, self.plain.components)

    def _is(self, group: Subgroup, components: list[dict[str, torch.Tensor]]) -> bool:
        for segment in group.segments:
            for name, whole in components[segment.parameter].items():
                expected = whole[segment.start : segment.start + segment.length]
                out = torch.empty_like(expected)
                self.state.components.read(segment.parameter, name, segment.start, out)
                if not same_bits(out, expected):
                    return False
        return True

    def step(self) -> None:
        """Forward, backward with two gradients for some, and an update."""
        order = range(len(SIZES))
        for parameter in order:
            self._use(parameter)
        for parameter in reversed(order):
            self._use(parameter)
            seeds = [next(self.seeds) for _ in range(1 + parameter % 2)]
            self._add_gradients(parameter, seeds)
        updates = self.plain.updates(order)
        self.meet(lambda: self.state.step(updates, 0.5))
        self.before = copy.deepcopy(self.plain.components)
        self.plain.step(updates, 0.5)

    def _use(self, parameter: int) -> None:
        weight = self.meet(lambda: self.state.weights.acquire([parameter], "test"))[0]
        assert same_bits(weight, self.plain.weight(parameter))
        self.state.weights.release("test")

    def _add_gradients(self, parameter: int, seeds: list[int]) -> None:
        """All of them again when one fails: what there was of the sum may be gone."""
        spec = self.specs[parameter]
        gradients = [random_values(seed, spec.numel, spec.dtype) for seed in seeds]

        def add_all() -> None:
            self.state.clear_gradients(parameter)
            for gradient in gradients:
                self.state.add_gradient(parameter, gradient)

        self.meet(add_all)
        for gradient in gradients:
            self.plain.add_gradient(parameter, gradient)

    def check_all(self) -> None:
        self.meet(self.state.flush)
        assert_same(self.state, self.plain)
        assert len(self.state.stages._slots) == NUM_SLOTS
        spill = self.state.slabs.get("spill")
        assert spill is None or spill.used_bytes == 0
        extents = self.state.extents
        assert extents is not None
        published = {e for e in self.state.components._on_nvme.values() if e is not None}
        spilled = set(self.state.gradients._on_nvme.values())
        assert extents.used_bytes == sum(extent.nbytes for extent in published | spilled)


@example(  # the first read of several for one parameter fails while the others are in flight
    seed=0,
    kind="read",
    after=0,
    times=1,
    dtype=torch.float32,
    state_on_host={3},
    gradient_on_host=set(),
    speculative=False,
    overlap=False,
)
@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    kind=st.sampled_from(["read", "write", "allocate"]),
    after=st.integers(0, 150),
    times=st.sampled_from([1, 1, 2, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    state_on_host=st.sets(st.integers(0, 5), max_size=3),
    gradient_on_host=st.sets(st.integers(0, 12)),
    speculative=st.booleans(),
    overlap=st.booleans(),
)
def test_training_that_meets_an_error_comes_out_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    kind: Kind,
    after: int,
    times: int,
    dtype: torch.dtype,
    state_on_host: set[int],
    gradient_on_host: set[int],
    speculative: bool,
    overlap: bool,
) -> None:
    folder = tmp_path_factory.mktemp("swap")
    before = Leftovers.of(folder)
    with ExitStack() as stack:
        training = Training(
            stack,
            folder,
            seed=seed,
            dtype=dtype,
            speculative=speculative,
            overlap=overlap,
            state_on_nvme=lambda unit: unit not in state_on_host,
            gradient_on_nvme=lambda group: group not in gradient_on_host,
        )
        training.step()
        training.faults.arm(kind, ERRNOS[kind], after=after, times=times)
        for _ in range(3):
            training.step()
        training.faults.disarm()
        training.check_all()
        training.step()
        training.check_all()
    assert Leftovers.of(folder) == before


@pytest.fixture
def make(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield lambda **options: Training(stack, tmp_path, **options)


def write_of_component(request: Any) -> bool:
    """Write-backs are whole components of two pieces; spills are chunks of one."""
    return bool(memoryview(request.buffer).nbytes > 4 * PIECE)


@pytest.mark.parametrize("after", range(0, 7, 2))
def test_failed_write_back_is_raised_by_the_next_step_and_changes_nothing_else(
    make: Callable[..., Training], after: int
) -> None:
    training = make(seed=after)
    training.step()
    training.meet(training.state.flush)
    training.faults.arm("write", errno.EIO, after=after, times=1000, matches=write_of_component)
    training.step()
    assert training.errors == []
    for _ in range(2):
        with pytest.raises(AioError) as caught:
            training.state.step({}, 1.0)
        training.check_error(caught.value)
        assert str(caught.value).count("call offloaded.flush() to finish it") == 1
        training.check_subgroups()
    training.mend()
    training.check_all()


def test_error_stays_until_the_disk_works_again(make: Callable[..., Training]) -> None:
    training = make(seed=1)
    training.step()
    training.state.flush()
    training.faults.arm("write", errno.EIO, times=1000, matches=write_of_component)
    training.step()
    for _ in range(4):
        with pytest.raises(AioError):
            training.state.flush()
        training.check_subgroups()
    training.mend()
    training.check_all()


def _stopped(make: Callable[..., Training]) -> Training:
    """A training whose second step an I/O error has stopped."""
    training = make(seed=1)
    training.step()
    training.state.flush()
    training.faults.arm("write", errno.EIO, after=2, matches=write_of_component)
    training.step()
    training.state.wait_for_updates()
    return training


@pytest.mark.parametrize(
    ("name", "is_behind"), [("submit", False), ("_begin", False), ("_begin", True)]
)
def test_interrupt_as_a_stopped_step_is_begun_again_has_it_finished_once(
    make: Callable[..., Training], name: str, is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread has it, or when that has even done it: handlers take their time."""
    training = _stopped(make)
    method = getattr(UpdatePipeline, name)

    def interrupted(pipeline: UpdatePipeline, *arguments: Any) -> None:
        if is_behind:
            method(pipeline, *arguments)
            pipeline.join()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UpdatePipeline, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.state.flush()
    assert is_behind != bool(training.state.unfinished)
    for parameter in training.state.unfinished:  # others are told what to mend, not of Ctrl-C
        with pytest.raises(AioError, match=r"not finished: mend that, then call offloaded\.flush"):
            training.state.weights.acquire([parameter], "another")
    training.check_all()
    training.step()
    training.check_all()


def test_stopped_step_is_finished_once_where_two_threads_flush(
    make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes to begin it, too, when the thread of updates has that of the first."""
    training = _stopped(make)
    submit, turns, is_taken = UpdatePipeline.submit, iter(range(2)), threading.Event()
    is_second = threading.Event()

    def in_turn(pipeline: UpdatePipeline, *arguments: Any) -> None:
        if next(turns) == 0:
            is_second.wait(0.5)
            submit(pipeline, *arguments)
            while pipeline.failure is not None:
                time.sleep(0.001)
            is_taken.set()
        else:
            is_second.set()
            assert is_taken.wait(10)
            submit(pipeline, *arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(UpdatePipeline, "submit", in_turn)
        for done in [threads.submit(training.state.flush) for _ in range(2)]:
            done.result()
    training.check_all()


def test_weights_that_are_not_at_home_are_not_given_out_after_an_error(
    make: Callable[..., Training],
) -> None:
    """They were passed on before they were written; what failed must not be computed with."""
    training = make(seed=1)
    training.step()
    training.state.flush()
    training.faults.arm("write", errno.ENOSPC, times=1000, matches=write_of_component)
    training.step()
    with pytest.raises(AioError):
        training.state.flush()
    for parameter in (0, 2, 4):
        with pytest.raises(AioError) as caught:
            training.state.weights.borrow(parameter)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(AioError):
            training.state.add_gradient(parameter, torch.zeros(SIZES[parameter]))
    training.mend()
    for parameter in range(len(SIZES)):
        weight = training.state.weights.borrow(parameter)
        assert same_bits(weight, training.plain.weight(parameter))


def test_part_of_a_split_parameter_that_fails_does_not_spoil_the_others(
    make: Callable[..., Training],
) -> None:
    """One part is written, another is not: the retry must not take the first for cached."""
    for after in range(8):
        training = make(seed=after)
        training.step()
        training.state.flush()
        training.faults.arm("write", errno.EIO, after=after, matches=write_of_component)
        training.step()
        try:
            training.state.flush()
        except AioError:
            training.mend()
        for parameter in range(len(SIZES)):
            weight = training.state.weights.borrow(parameter)
            assert same_bits(weight, training.plain.weight(parameter))
        training.check_all()


@pytest.mark.parametrize("kind", ["write", "allocate"])
def test_closing_after_an_error_is_quiet_and_leaves_nothing(tmp_path: Path, kind: Kind) -> None:
    before = Leftovers.of(tmp_path)
    with ExitStack() as stack:
        training = Training(stack, tmp_path, seed=1)
        training.step()
        training.state.flush()
        training.faults.arm(kind, ERRNOS[kind], times=100_000)
        if kind == "allocate":
            extents = training.state.extents
            assert extents is not None
            for volume in extents._volumes:
                while volume.ranges.allocate(PIECE) is not None:
                    continue
        training.step()
        training.state.close()
    assert Leftovers.of(tmp_path) == before
