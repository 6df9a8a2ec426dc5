"""Memory of a slab that is no single range any more: what lies apart, and what it takes the place
of.
"""

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import Slab, SlabFullError
from tests.aio.conftest import Bytes
from tests.support.examples import examples
from tests.support.interrupts import Lines, interrupt, interrupt_behind_call

PAGE = mmap.PAGESIZE


def pages_of(slab: Slab) -> int:
    """How many pages of its mapping have memory: bit 63 of each entry says so, 62 in swap space."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(slab.address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(slab.nbytes // PAGE * 8), np.uint64)
    return int((entries >> np.uint64(62) != 0).sum())


def test_range_that_lies_apart_takes_the_place_of_pages_that_are_free() -> None:
    slab = Slab(8 * PAGE, huge_pages=False)
    arrays = [slab.allocate(2 * PAGE) for _ in range(4)]
    for array in arrays:
        array[:] = 1
    del arrays[0], arrays[1], array  # the first and the third
    with pytest.raises(SlabFullError):
        slab.allocate(3 * PAGE)
    apart = slab.allocate(3 * PAGE, apart=True)
    apart[:] = 2
    assert (slab.used_bytes, slab.free_bytes, slab.peak_bytes) == (7 * PAGE, PAGE, 8 * PAGE)
    assert pages_of(slab) == 4
    for wanted in (2 * PAGE, PAGE + 1):  # there is a range, but too much would be in use
        with pytest.raises(SlabFullError) as caught:
            slab.allocate(wanted, apart=True)
        assert (caught.value.free, caught.value.largest_free) == (PAGE, PAGE)
    arrays.pop()[:] = 1
    assert slab.free_bytes == 3 * PAGE
    assert pages_of(slab) == 2, "what is free gives its pages back for as long as one lies apart"
    assert (apart == 2).all()
    assert (arrays[0] == 1).all()
    del apart
    assert (slab.used_bytes, slab.free_bytes) == (2 * PAGE, 6 * PAGE)
    assert slab.wait_for_release(0)
    del arrays[:]
    assert slab.largest_free_bytes == 8 * PAGE


def test_huge_pages_do_not_come_back_with_what_is_free_while_something_lies_apart() -> None:
    pages = (2 << 20) // PAGE
    slab = Slab(4 * pages * PAGE)
    arrays = [slab.allocate(pages * PAGE) for _ in range(4)]
    for array in arrays:
        array[:] = 1
    del arrays[0], arrays[1], array  # the first and the third
    apart = slab.allocate(pages * PAGE + 1, apart=True)
    assert pages_of(slab) == 2 * pages
    small = slab.allocate(1)
    small[:] = 1
    assert pages_of(slab) == 2 * pages + 1
    del apart, small
    assert slab.free_bytes == 2 * pages * PAGE
    slab.allocate(pages * PAGE)[:] = 1
    assert pages_of(slab) >= 3 * pages
    assert not slab._is_in_small_pages


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_free_bytes_are_enough_wherever_they_are_and_memory_is_never_more(
    data: st.DataObject,
) -> None:
    slab = Slab(16 * PAGE, huge_pages=False)
    held: list[Bytes] = []
    for number in range(data.draw(st.integers(1, 30))):
        if len(held) > 0 and data.draw(st.booleans()):
            array = held.pop(data.draw(st.integers(0, len(held) - 1)))
            assert (array == array[0]).all()
            del array
        wanted = data.draw(st.integers(1, 8))
        used = sum(-(-array.nbytes // PAGE) for array in held)
        if wanted <= 16 - used:
            held.append(slab.allocate(wanted * PAGE, apart=True))
            held[-1][:] = number
        else:
            with pytest.raises(SlabFullError):
                slab.allocate(wanted * PAGE, apart=True)
        begin, end = slab.address, slab.address + slab.nbytes
        apart = sum(a.nbytes // PAGE for a in held if not begin <= a.ctypes.data < end)
        assert pages_of(slab) + apart <= 16
    held.clear()
    assert (slab.used_bytes, slab.largest_free_bytes) == (0, 16 * PAGE)


@pytest.mark.parametrize("how", [interrupt, interrupt_behind_call])
def test_interrupt_at_any_line_or_call_loses_nothing_that_lies_apart(
    how: Callable[[Callable[[], object], int | None], Lines],
) -> None:
    slab = Slab(8 * PAGE, huge_pages=False)
    kept = [slab.allocate(PAGE) for _ in range(8)][3:5]

    def use() -> None:
        apart = slab.allocate(5 * PAGE, apart=True)
        with pytest.raises(SlabFullError):
            slab.allocate(2 * PAGE, apart=True)
        del apart
        slab.wait_for_release(10.0)
        slab.allocate(3 * PAGE)

    total = how(use, None).seen
    assert total > 20
    for number in range(total):
        place = how(use, number).line
        assert (slab.used_bytes, slab.largest_free_bytes) == (2 * PAGE, 3 * PAGE), place
    del kept
    gc.collect()
    assert slab.largest_free_bytes == 8 * PAGE


def test_what_lies_apart_outlives_the_slab_and_is_inherited_as_the_slab_is() -> None:
    slab = Slab(4 * PAGE)
    kept = [slab.allocate(PAGE) for _ in range(4)][1:2]
    apart = slab.allocate(3 * PAGE, apart=True)
    apart[:] = 3
    child = os.fork()
    if child == 0:
        apart[:] = 4
        os._exit(slab.used_bytes // PAGE)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    slab.close()
    del slab, kept
    gc.collect()
    assert (apart == 3).all()
