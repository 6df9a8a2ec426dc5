"""Memory for I/O: one anonymous mapping, handed out in page-aligned ranges.

Invariants:
- A range is handed out again only when nothing refers to its memory any more. Each range has an
  owner object; numpy arrays, torch tensors, memoryviews and operations in flight all keep it alive,
  directly or through one another, and the slab learns of its end by a weak reference.
- What is handed out, in the mapping or apart from it, is at most the size of the slab. While
  anything lies apart, free ranges have no pages, so memory is at most that size, too.
"""

import os
import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aio._native import ffi, lib
from aio.errors import check_flag, check_int, check_seconds
from aio.process.memory import lock_memory
from aio.process.threads import LOOK_SECONDS
from aio.ranges import RangeAllocator

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_APART = -1
"""In place of an offset: the range is a mapping of its own."""


class SlabFullError(MemoryError):
    """A slab has no free range that is large enough.

    `asked`, `free` and `largest_free` are bytes; when `asked` is at most `free`, the slab is
    fragmented rather than full.
    """

    def __init__(self, asked: int, free: int, largest_free: int) -> None:
        super().__init__(asked, free, largest_free)
        self.asked = asked
        self.free = free
        self.largest_free = largest_free

    def __str__(self) -> str:
        return (
            f"cannot take {self.asked} bytes from the slab: {self.free} bytes are free, the largest"
            f" range has {self.largest_free}; release buffers or make the slab larger"
        )


class _Owner:
    """What numpy sees as the memory of one range; its end is the end of the last use."""

    __slots__ = ("__array_interface__", "__weakref__", "_mapping")

    def __init__(self, mapping: object, address: int, nbytes: int) -> None:
        self._mapping = mapping  # the memory outlives the slab when somebody still looks at it
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


class _Waiter:
    """A thread that waits for a range to come back, and hears of every one that does."""

    def __init__(self) -> None:
        self.told: SimpleQueue[object] = SimpleQueue()
        self._watches: list[weakref.ref[_Owner]] = []

    def watch(self, owner: _Owner) -> None:
        self._watches.append(weakref.ref(owner, self.told.put))


class Slab:
    """`nbytes` of memory for I/O, handed out in ranges.

    Thread-safe. Memory is touched when it is first used; `lock` touches it now and keeps it from
    being swapped out. A lock that fails is one warning with lock=True, and an AioError with
    lock="required". `huge_pages` asks for transparent huge pages: to a device, 1 MiB of them is one
    segment, of ordinary pages 256. What is not `inherited` is not there in forked children, and
    costs no second copy of what is written here while one lives; touching it there ends the child,
    so it is for memory that nobody outside sees.

    Raises ValueError when nbytes is not positive, MemoryError when the address space is spent.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        lock: bool | Literal["required"] = False,
        huge_pages: bool = True,
        inherited: bool = True,
    ) -> None:
        nbytes = check_int("nbytes", nbytes)
        huge_pages = check_flag("huge_pages", huge_pages)
        inherited = check_flag("inherited", inherited)
        if lock != "required":
            check_flag("lock", lock)
        if nbytes <= 0:
            raise ValueError(f"cannot make a slab of {nbytes} bytes: ask for one or more")
        self._nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        self._mapping = _map(self._nbytes, huge_pages, inherited)
        self._address = _address_of(self._mapping)
        self._kind = huge_pages, inherited
        if lock:
            lock_memory(self._mapping.address, self._nbytes, required=lock == "required")
        self._allocator = RangeAllocator(self._nbytes, alignment=_PAGE_BYTES)
        # What is handed out, by a reference that goes to `_ended` when the owner does. That may be
        # at any allocation, on any thread, also inside the lock; putting it there takes no lock,
        # and runs no Python, which would swallow an interrupt.
        self._ranges: dict[weakref.ref[_Owner], tuple[int, int]] = {}
        self._is_in_small_pages = False  # as long as there are some
        self._ended: SimpleQueue[weakref.ref[_Owner]] = SimpleQueue()
        self._waiters: list[weakref.ref[_Waiter]] = []
        self._lock = threading.Lock()  # guards the allocator, all of this and closing
        self._is_consistent = True  # else an interrupt has come between two of them
        self._peak_bytes = 0
        self._num_releases = 0
        self._seen = threading.local()  # .releases: how many the thread knew of when it last looked
        self._closed = False
        _slabs.add(self)

    def allocate(self, nbytes: int, *, apart: bool = False) -> npt.NDArray[np.uint8]:
        """A writable array of exactly `nbytes`, page-aligned, its contents undefined.

        The range is free again when the array and everything made from it (slices, tensors of
        torch.from_numpy, memoryviews, operations) are gone.

        With `apart` it is enough that so many bytes are free, wherever they are: where they are no
        single range, the array gets a mapping of its own, and the free ranges give their pages
        back. New pages cost time, so ask for it when there is no other way. It does nothing for a
        slab that is locked, and must not be asked of one whose pages a device knows.

        Raises SlabFullError when no free range is large enough, ValueError when nbytes is
        negative or the slab is closed.
        """
        nbytes = check_int("nbytes", nbytes)
        if nbytes < 0:
            raise ValueError(f"cannot take {nbytes} bytes from the slab")
        with self._lock:
            if self._closed:
                raise ValueError("cannot take memory from the slab: it is closed")
            if nbytes == 0:
                return np.empty(0, np.uint8)
            self._collect()
            self._seen.releases = self._num_releases
            owner = self._hand_out(nbytes, apart)
            self._peak_bytes = max(self._peak_bytes, self._allocator.used_bytes)
        return np.asarray(owner)

    def _hand_out(self, nbytes: int, apart: bool) -> _Owner:
        """A range and its owner, both or neither; with the lock held."""
        fits = self._allocator.rounded(nbytes) <= self._allocator.free_bytes
        self._is_consistent = False
        offset = self._allocator.allocate(nbytes) if fits else None
        if offset is not None:
            owner = _Owner(self._mapping, self._address + offset, nbytes)
        elif mapping := self._map_apart(nbytes) if fits and apart else None:
            owner = _Owner(mapping, _address_of(mapping), nbytes)
            self._allocator.apart_bytes += self._allocator.rounded(nbytes)
        else:
            self._is_consistent = True
            if self._find_lost():
                return self._hand_out(nbytes, apart)
            raise SlabFullError(
                nbytes, self._allocator.free_bytes, self._allocator.largest_free_bytes
            )
        place = _APART if offset is None else offset
        self._ranges[weakref.ref(owner, self._ended.put)] = place, nbytes
        self._is_consistent = True
        for reference in self._waiters:
            if waiter := reference():
                waiter.watch(owner)
        return owner

    def _map_apart(self, nbytes: int) -> Any:
        """A mapping in place of the pages that free ranges have; None if there is none.

        Huge pages would come back with all that is free around what is touched.
        """
        self._is_in_small_pages = True
        self._wish_for(huge_pages=False)
        if not self._discard_free():
            return None
        try:
            return _map(self._allocator.rounded(nbytes), *self._kind)
        except MemoryError:
            return None

    def _wish_for(self, *, huge_pages: bool) -> None:
        """Ask for pages of that kind; a kernel without huge ones has no choice."""
        lib.aio_memory_huge(self._mapping.address, self._nbytes, huge_pages)

    def _discard_free(self) -> bool:
        """Free ranges give their pages back; False if the system keeps them."""
        return not any(
            lib.aio_memory_discard(self._mapping.address + offset, nbytes)
            for offset, nbytes in self._allocator.free_ranges()
        )

    def wait_for_release(self, timeout: float | None) -> bool:
        """Waits until a range has come back; False when none did within `timeout` seconds.

        A range that came back since this thread's last allocate() or wait_for_release() counts,
        so that nothing is missed between a SlabFullError and this call. None waits without limit.
        """
        check_seconds("timeout", timeout)
        if self._release_is_new():
            return True
        if timeout is not None and timeout <= 0:
            return False
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = self._begin_to_wait()
        while not self._release_is_new():
            left = LOOK_SECONDS
            if deadline is not None and (left := min(left, deadline - time.monotonic())) <= 0:
                return False
            try:
                waiter.told.get(timeout=left)
            except Empty:
                with self._lock:
                    self._find_lost()
        return True

    def _begin_to_wait(self) -> _Waiter:
        """What ends from now on is told the waiter, as long as there is one."""
        waiter = _Waiter()
        with self._lock:
            self._waiters = [one for one in self._waiters if one() is not None]
            self._waiters.append(weakref.ref(waiter))
            for reference in self._ranges:
                if owner := reference():
                    waiter.watch(owner)
        return waiter

    def _release_is_new(self) -> bool:
        with self._lock:
            self._collect()
            is_new = self._num_releases != getattr(self._seen, "releases", 0)
            self._seen.releases = self._num_releases
            return is_new

    def _collect(self) -> None:
        """Takes back what has been released; with the lock held."""
        has_freed = not self._is_consistent
        if has_freed:
            self._take_stock()
        while not self._ended.empty():
            self._is_consistent = False
            place = self._ranges.pop(self._ended.get_nowait(), None)
            if place is not None:  # else it was found when stock was taken
                self._take_back(*place)
                self._num_releases += 1
                has_freed = True
            self._is_consistent = True
        if self._mapping is None:
            return
        if has_freed and self._allocator.apart_bytes:
            self._discard_free()
        if self._is_in_small_pages and not self._allocator.apart_bytes:
            if self._kind[0]:
                self._wish_for(huge_pages=True)
            self._is_in_small_pages = False

    def _take_back(self, offset: int, nbytes: int) -> None:
        if offset == _APART:
            self._allocator.apart_bytes -= self._allocator.rounded(nbytes)
        else:
            self._allocator.release(offset, nbytes)

    def _find_lost(self) -> bool:
        """Takes back what ended with no memory to tell of it, if any; with the lock held."""
        if all(one() is not None for one in self._ranges):
            return False
        self._take_stock()
        return True

    def _take_stock(self) -> None:
        """Takes back whatever has no owner, after an interrupt that may have lost sight of it."""
        ranges = list(self._ranges.items())
        self._ranges = {one: place for one, place in ranges if one() is not None}
        self._allocator.release_others([offset for offset, _ in self._ranges.values()])
        apart = (nbytes for offset, nbytes in self._ranges.values() if offset == _APART)
        self._allocator.apart_bytes = sum(map(self._allocator.rounded, apart))
        self._num_releases += 1
        self._is_consistent = True

    def after_fork(self) -> None:
        """In a child: whoever had the lock, in the midst of something perhaps, is not there."""
        self._lock = threading.Lock()
        self._is_consistent = False

    @property
    def address(self) -> int:
        """Of the first byte; with `nbytes`, what cudaHostRegister wants to know."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size of the mapping: what was asked for, rounded up to whole pages."""
        return self._nbytes

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The most that one allocate() can get now."""
        with self._lock:
            self._collect()
            return self._allocator.largest_free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of whole pages handed out."""
        with self._lock:
            self._collect()
            return self._allocator.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest used_bytes there has been."""
        with self._lock:
            return self._peak_bytes

    def close(self) -> None:
        """Hands out nothing more. The memory is unmapped when nothing refers to it any more.

        Idempotent. Arrays that were handed out stay valid.
        """
        with self._lock:
            self._closed = True
            self._mapping = None

    def __enter__(self) -> "Slab":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_slabs: weakref.WeakSet[Slab] = weakref.WeakSet()


def _after_fork() -> None:
    for slab in list(_slabs):
        slab.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _map(nbytes: int, huge_pages: bool, inherited: bool) -> Any:
    """An anonymous mapping that unmaps itself with its last reference."""
    mapping = ffi.gc(ffi.new("aio_mapping *"), lib.aio_mapping_drop)
    if nbytes >= 1 << 63 or lib.aio_mapping_new(mapping, nbytes, huge_pages, inherited):
        raise MemoryError(f"cannot map {nbytes} bytes: the address space or its limit is spent")
    return mapping


def _address_of(mapping: Any) -> int:
    return int(ffi.cast("uintptr_t", mapping.address))
