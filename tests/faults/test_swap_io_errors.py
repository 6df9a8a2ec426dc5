"""I/O errors under training: each is raised with its place, and costs a retry and nothing else.

After any error: every subgroup is as it was before the step or as it is after it, in all of its
components; when the disk works again, ``flush`` finishes the step; and what comes out is what comes
out without errors, to the last bit. No slot, extent, descriptor or memory is lost on the way.
"""

import errno
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aio import AioError
from swap.plan.layout import PIECE
from tests.support.examples import examples
from tests.support.failing_disk import ERRNOS, SIZES, Training, trainings, write_of_component
from tests.support.late_engine import Kind
from tests.support.tiers import Leftovers, same_bits


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


make = trainings()


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
