"""A range of a slab comes back exactly when nothing can reach its memory any more."""

import gc
import logging
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from aio import AioError, Engine, Slab, SlabFullError
from tests.aio.conftest import Bytes, Gate, run_python

PAGE = resource.getpagesize()
MIB = 1 << 20


def test_array_is_writable_page_aligned_and_exactly_as_long() -> None:
    slab = Slab(MIB)
    arrays = [slab.allocate(nbytes) for nbytes in (1, 4095, 4096, 4097)]
    for array, nbytes in zip(arrays, (1, 4095, 4096, 4097), strict=True):
        assert array.dtype == np.uint8
        assert array.shape == (nbytes,)
        assert array.ctypes.data % PAGE == 0
        assert slab.address <= array.ctypes.data <= slab.address + slab.nbytes - nbytes
        array[:] = 1
    assert slab.used_bytes == 5 * PAGE
    assert slab.free_bytes == MIB - 5 * PAGE
    assert all(int(array.sum()) == len(array) for array in arrays)


def test_empty_array_takes_no_range() -> None:
    slab = Slab(PAGE)
    assert slab.allocate(0).nbytes == 0
    assert slab.used_bytes == 0


# What may be the last thing to refer to a range.
HOLDERS: dict[str, Callable[[Bytes], object]] = {
    "array": lambda array: array,
    "slice": lambda array: array[10:20],
    "slice of a slice": lambda array: array[10:20][::2],
    "view of another type": lambda array: array[:16].view(np.float32).reshape(2, 2),
    "memoryview": lambda array: array.data[5:],
    "tensor": torch.from_numpy,
    "view of a tensor": lambda array: torch.from_numpy(array)[4:8].view(torch.int32),
    "storage of a tensor": lambda array: torch.from_numpy(array).untyped_storage(),
    "autograd graph": lambda array: (
        torch.from_numpy(array[:16].view(np.float32)).requires_grad_().exp().sum()
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_range_is_held_by_the_last_reference_and_free_without_it(holder: str) -> None:
    slab = Slab(8 * PAGE)
    array = slab.allocate(3 * PAGE)
    array[:] = 0
    held = HOLDERS[holder](array)
    del array
    gc.collect()
    assert slab.used_bytes == 3 * PAGE
    del held
    assert slab.used_bytes == 0
    assert slab.largest_free_bytes == 8 * PAGE


def test_operation_in_flight_holds_its_range(
    gate: Gate, gated: Engine, make_file: Callable[..., Path]
) -> None:
    slab = Slab(8 * PAGE)
    with gated.open(make_file(PAGE)) as file:
        operation = gated.read(file, 0, slab.allocate(PAGE))
        request = operation.request
        del operation, request
        gc.collect()
        assert slab.used_bytes == PAGE
        gate.open()
    # Closing the file waited for the operation; nothing else refers to the buffer.
    assert slab.used_bytes == 0


def test_range_is_free_as_soon_as_the_result_is_there(
    engine: Engine, make_file: Callable[..., Path]
) -> None:
    """No thread of the engine keeps a finished operation for a moment longer."""
    slab = Slab(PAGE)
    with engine.open(make_file(PAGE)) as file:
        for _ in range(300):
            engine.read(file, 0, slab.allocate(PAGE)).result()


def test_full_slab_raises_with_the_numbers() -> None:
    slab = Slab(4 * PAGE)
    kept = [slab.allocate(PAGE) for _ in range(4)]
    del kept[0], kept[1]  # the first and the third: two free pages that do not touch
    with pytest.raises(SlabFullError) as caught:
        slab.allocate(PAGE + 1)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.asked, error.free, error.largest_free) == (PAGE + 1, 2 * PAGE, PAGE)
    assert str(error) == (
        f"cannot take {PAGE + 1} bytes from the slab: {2 * PAGE} bytes are free, the largest range"
        f" has {PAGE}; release buffers or make the slab larger"
    )
    assert slab.peak_bytes == 4 * PAGE


def test_closed_slab_hands_out_nothing_and_leaves_arrays_valid() -> None:
    slab = Slab(4 * PAGE)
    array = slab.allocate(PAGE)
    slab.close()
    slab.close()
    with pytest.raises(ValueError, match="it is closed"):
        slab.allocate(1)
    array[:] = 5
    assert int(array.sum()) == 5 * PAGE


def test_memory_is_unmapped_after_slab_and_arrays_are_gone() -> None:
    slab = Slab(64 * MIB)
    address = slab.address
    array = slab.allocate(PAGE)
    del slab
    gc.collect()
    array[:] = 1
    assert _flags_of_mapping(address) is not None
    del array
    assert _flags_of_mapping(address) is None


def test_wait_for_release_sees_a_range_that_came_back_before_it() -> None:
    slab = Slab(PAGE)
    array = slab.allocate(PAGE)
    with pytest.raises(SlabFullError):
        slab.allocate(1)
    del array
    assert slab.free_bytes == PAGE  # taken back by another call, and still not missed
    assert slab.wait_for_release(0)
    assert not slab.wait_for_release(0)


def test_wait_for_release_wakes_every_waiter() -> None:
    slab = Slab(4 * PAGE)
    kept = [slab.allocate(2 * PAGE), slab.allocate(2 * PAGE)]
    got: list[Bytes] = []
    full = threading.Semaphore(0)

    def take() -> None:
        while True:
            try:
                got.append(slab.allocate(PAGE))
                return
            except SlabFullError:
                full.release()
                slab.wait_for_release(60)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert full.acquire(timeout=60)
    assert full.acquire(timeout=60)
    kept.pop()  # one range, enough for both
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert len(got) == 2


def test_finalizer_inside_the_slabs_own_lock_does_not_deadlock() -> None:
    """The garbage collector may run anywhere: here, each time the allocator takes a range."""
    slab = Slab(64 * PAGE)

    class Cycle:
        def __init__(self, array: Bytes) -> None:
            self.array = array
            self.me = self

    allocate = slab._allocator.allocate

    def allocate_and_collect(nbytes: int) -> int | None:
        gc.collect()
        return allocate(nbytes)

    slab._allocator.allocate = allocate_and_collect  # type: ignore[method-assign]
    for _ in range(6):
        Cycle(slab.allocate(3 * PAGE))
    gc.collect()
    assert slab.used_bytes == 0


def test_threads_share_a_slab_and_nothing_is_lost() -> None:
    slab = Slab(256 * PAGE)
    failures: list[BaseException] = []

    def churn(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            held: list[Bytes] = []
            for _ in range(400):
                if held and rng.random() < 0.5:
                    array = held.pop(int(rng.integers(len(held))))
                    assert (array == seed).all()
                else:
                    try:
                        held.append(slab.allocate(int(rng.integers(1, 6 * PAGE))))
                        held[-1][:] = seed
                    except SlabFullError:
                        held.clear()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (slab.used_bytes, slab.largest_free_bytes) == (0, 256 * PAGE)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_slab_of_no_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="ask for one or more"):
        Slab(nbytes)


def test_slab_above_the_address_space_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match="address space"):
        Slab(1 << 62)


# The address sanitizer makes mlock() a call that does nothing.
can_lock = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="needs a real mlock"
)


@can_lock
def test_locked_slab_is_in_memory_from_the_start() -> None:
    try:
        slab = Slab(4 * MIB, lock="required")
    except AioError as error:
        pytest.skip(str(error))
    resident = _status_kib("VmLck")
    assert resident * 1024 >= slab.nbytes


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1])


# Without the right to lock: root has it whatever the limit, so it is dropped first.
_UNLOCKABLE = """
    import ctypes, logging, os, resource, sys
    from aio import AioError, Slab

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
    slab = Slab(1 << 20, lock=True)
    slab.allocate(10)[:] = 1
    try:
        Slab(1 << 20, lock="required")
    except AioError as error:
        print(error.errno, error)
"""


@can_lock
def test_lock_that_fails_is_a_warning_or_with_required_an_error() -> None:
    warning, error = run_python(_UNLOCKABLE)
    assert warning.startswith("WARNING cannot lock 1048576 bytes of memory: ")
    assert "the kernel may swap the buffers out" in warning
    assert "cannot lock 1048576 bytes of memory" in error
    assert "ulimit -l" in error


def test_slab_itself_is_collected_while_its_arrays_live() -> None:
    slab = Slab(PAGE)
    array = slab.allocate(1)
    gone = weakref.ref(slab)
    del slab
    assert gone() is None
    array[0] = 9
    assert array[0] == 9


def test_huge_pages_are_asked_for_by_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        slab, plain = Slab(4 * MIB), Slab(4 * MIB, huge_pages=False)
    assert slab.address % (2 * MIB) == 0
    assert caplog.records == []
    asked, unasked = _flags_of_mapping(slab.address), _flags_of_mapping(plain.address)
    assert asked is not None
    assert unasked is not None
    if "hg" not in asked:
        pytest.skip("this kernel has no transparent huge pages")
    assert "hg" not in unasked


def _flags_of_mapping(address: int) -> list[str] | None:
    """VmFlags of the mapping that `address` is in; None when it is in none."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].endswith(":"):
            if inside and line.startswith("VmFlags:"):
                return line.split()[1:]
        else:
            begin, _, end = line.split()[0].partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
    return None


@pytest.mark.parametrize("inherited", [True, False])
def test_slab_is_mapped_in_forked_children_only_if_inherited(inherited: bool) -> None:
    slab = Slab(1 << 21, inherited=inherited)
    slab.allocate(100)[:] = 7
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with Path("/proc/self/maps").open() as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        is_there = any(int(a, 16) <= slab.address < int(b, 16) for a, b in ranges)
        os.write(write_end, b"y" if is_there else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 1) == (b"y" if inherited else b"n")
    os.close(read_end)
    os.close(write_end)


def test_slab_locked_by_a_thread_of_the_parent_hands_out_memory_in_a_forked_child() -> None:
    slab = Slab(1 << 20)
    kept = slab.allocate(4096)
    with slab._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(len(slab.allocate(100)) + slab.used_bytes // 4096)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 101
    assert slab.used_bytes == len(kept)
