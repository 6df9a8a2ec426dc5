"""RangeAllocator against a model that keeps one flag per unit of the space."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import RangeAllocator
from tests.support.examples import examples
from tests.support.interrupts import interrupt

ALIGNMENT = 8
Step = tuple[str, int]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 80)),
        st.tuples(st.just("release"), st.integers(0, 1000)),
        st.tuples(st.just("grow"), st.integers(0, 40)),
    ),
    max_size=60,
)


class Model:
    """The space as a list of units, each free or taken."""

    def __init__(self, nbytes: int) -> None:
        self.taken = [False] * (nbytes // ALIGNMENT)

    def free_runs(self) -> list[tuple[int, int]]:
        """(units, first unit) of every maximal free run."""
        runs: list[tuple[int, int]] = []
        begin = 0
        for unit, taken in enumerate([*self.taken, True]):
            if taken:
                if unit > begin:
                    runs.append((unit - begin, begin))
                begin = unit + 1
        return runs

    def allocate(self, nbytes: int) -> int | None:
        """Best fit, lowest offset first."""
        units = -(-nbytes // ALIGNMENT)
        fitting = sorted(run for run in self.free_runs() if run[0] >= units)
        if not fitting:
            return None
        begin = fitting[0][1]
        self.taken[begin : begin + units] = [True] * units
        return begin * ALIGNMENT

    def release(self, offset: int, nbytes: int) -> None:
        begin, units = offset // ALIGNMENT, -(-nbytes // ALIGNMENT)
        assert all(self.taken[begin : begin + units])
        self.taken[begin : begin + units] = [False] * units

    def grow(self, nbytes: int) -> None:
        self.taken += [False] * (nbytes // ALIGNMENT)


@settings(max_examples=examples(300), deadline=None)
@given(nbytes=st.integers(0, 400), script=steps)
def test_allocator_does_what_the_model_does(nbytes: int, script: list[Step]) -> None:
    allocator = RangeAllocator(nbytes, alignment=ALIGNMENT)
    model = Model(nbytes)
    held: list[tuple[int, int]] = []
    for action, number in script:
        if action == "allocate":
            offset = allocator.allocate(number)
            assert offset == model.allocate(number)
            if offset is not None:
                held.append((offset, number))
        elif action == "release" and held:
            released = held.pop(number % len(held))
            allocator.release(*released)
            model.release(*released)
        elif action == "grow":
            allocator.grow(number)
            model.grow(number)
        runs = model.free_runs()
        assert allocator.nbytes == len(model.taken) * ALIGNMENT
        assert allocator.used_bytes == sum(model.taken) * ALIGNMENT
        assert allocator.free_bytes == allocator.nbytes - allocator.used_bytes
        assert allocator.largest_free_bytes == max([0, *(n * ALIGNMENT for n, _ in runs)])
    for released in held:
        allocator.release(*released)
    assert allocator.largest_free_bytes == allocator.free_bytes == allocator.nbytes


def test_release_of_what_is_not_allocated_raises_and_changes_nothing() -> None:
    allocator = RangeAllocator(1 << 16)
    offset = allocator.allocate(5000)
    assert offset == 0
    for wrong in ((4096, 5000), (0, 4096), (0, 9000), (8192, 1), (0,), (12345,)):
        with pytest.raises(ValueError, match="cannot release"):
            allocator.release(*wrong)
    allocator.release(0, 8000)  # 8000 and 5000 take the same two pages
    with pytest.raises(ValueError, match="it is not allocated"):
        allocator.release(0, 5000)
    assert allocator.free_bytes == 1 << 16


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocate_of_nothing_raises(nbytes: int) -> None:
    with pytest.raises(ValueError, match="ask for one or more"):
        RangeAllocator(4096).allocate(nbytes)


def test_space_that_fills_no_unit_is_never_handed_out() -> None:
    allocator = RangeAllocator(4095)
    assert (allocator.nbytes, allocator.allocate(1)) == (0, None)


@pytest.mark.parametrize(("nbytes", "alignment"), [(-1, 4096), (4096, 0)])
def test_impossible_spaces_are_refused(nbytes: int, alignment: int) -> None:
    with pytest.raises(ValueError, match=r"is not a positive number|is negative"):
        RangeAllocator(nbytes, alignment=alignment)


CALLS: dict[str, Callable[[RangeAllocator], object]] = {
    "allocate": lambda allocator: allocator.allocate(20),
    "release": lambda allocator: allocator.release(16, 16),
    "grow": lambda allocator: allocator.grow(24),
    "release_others": lambda allocator: allocator.release_others({0, 32}),
}


@pytest.mark.parametrize("call", CALLS)
def test_interrupted_call_has_happened_or_not(call: str) -> None:
    def make() -> RangeAllocator:
        made = RangeAllocator(96, alignment=ALIGNMENT)
        for _ in range(4):
            made.allocate(16)
        made.release(48, 16)
        return made

    def state_of(allocator: RangeAllocator) -> tuple[int, ...]:
        free, largest = allocator.free_bytes, allocator.largest_free_bytes
        assert free + allocator.used_bytes == allocator.nbytes
        return allocator.used_bytes, allocator.nbytes, free, largest

    done = make()
    before = state_of(done)
    lines = interrupt(partial(CALLS[call], done), None).seen
    after = state_of(done)
    assert before != after
    for number in range(lines):
        allocator = make()
        assert interrupt(partial(CALLS[call], allocator), number).line
        assert state_of(allocator) in (before, after)
        allocator.release_others({0})
        assert state_of(allocator)[2:] == (allocator.nbytes - 16,) * 2
        allocator.release(0, 16)
        assert allocator.allocate(allocator.nbytes) == 0


def test_split_range_is_released_in_parts_or_at_once() -> None:
    allocator = RangeAllocator(10, alignment=1)
    offset = allocator.allocate(6)
    assert offset == 0
    assert allocator.split(offset, [1, 2, 3]) == [0, 1, 3]
    with pytest.raises(ValueError, match="cannot release"):
        allocator.release(0, 6)
    allocator.release(1, 2)
    assert sorted(allocator.free_ranges()) == [(1, 2), (6, 4)]
    with pytest.raises(ValueError, match="cannot release 2 bytes at offset 1"):
        allocator.release(0, 1, 2, 3)
    assert allocator.free_bytes == 6
    allocator.release(0, 1)
    allocator.release(3, 3)
    offset = allocator.allocate(10)
    assert offset == 0
    allocator.split(offset, [4, 6])
    allocator.release(0, 4, 6)
    assert allocator.free_ranges() == [(0, 10)]


@pytest.mark.parametrize("sizes", [[3], [4, 3], [0, 6], [3, -1, 4]])
def test_split_into_anything_but_the_whole_range_raises_and_changes_nothing(
    sizes: list[int],
) -> None:
    allocator = RangeAllocator(10, alignment=1)
    allocator.allocate(6)
    with pytest.raises(ValueError, match="cannot split"):
        allocator.split(0, sizes)
    allocator.release(0, 6)
    assert allocator.free_bytes == 10
