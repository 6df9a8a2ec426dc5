"""Space on the SSDs, and copy-on-write over it.

An extent is a range of one swap file. It is written once after it was allocated and then only read;
new values go to a new extent, and the old one is released when the new one is complete. A pinned
extent keeps its bytes until the last pin is gone, so a snapshot copies nothing.

The files grow by ``fallocate`` in large steps: a full disk is an error before the first byte of a
write-back.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aio import AioError, Engine, Operation, RangeAllocator, Request
from swap.storage.directory import SwapDirectory

ALIGNMENT = 4096
_GROWTH_BYTES = 64 * 1024 * 1024
_GROWTH_PARTS = 16
"""Steps are large, but a small part of what a file has, so that it takes little more than it needs.
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` at ``offset`` of one directory's swap file, both multiples of ``ALIGNMENT``."""

    directory: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Volume:
    """One directory's file, its free ranges, and how much load it was given for its share."""

    directory: SwapDirectory
    share: float
    ranges: RangeAllocator = field(default_factory=lambda: RangeAllocator(0, alignment=ALIGNMENT))

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.ranges.nbytes

    @property
    def used_bytes(self) -> int:
        return self.ranges.used_bytes


class ExtentStore:
    """Extents over one or more directories, and requests to read and write them.

    Thread-safe. Directory ``k`` uses lanes ``k``, ``k + n`` and ``k + 2 n`` of the engine (n
    directories): reads on demand, reads for the update, writes. A slow SSD or a long write never
    delays another's reads.
    """

    LANES_PER_DIRECTORY = 3

    def __init__(
        self,
        directories: Sequence[SwapDirectory],
        engine: Engine,
        *,
        shares: Sequence[float] | None = None,
    ) -> None:
        shares = shares or [1.0] * len(directories)
        self._volumes = [_Volume(d, share) for d, share in zip(directories, shares, strict=True)]
        self._engine = engine
        self._pins: dict[Extent, int] = {}
        self._doomed: set[Extent] = set()
        self._lock = threading.Lock()
        self._peak_bytes = 0

    @property
    def num_directories(self) -> int:
        return len(self._volumes)

    @property
    def folders(self) -> list[Path]:
        """Of the swap files."""
        return [volume.directory.path for volume in self._volumes]

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reserve(self, nbytes: int) -> None:
        """Grow the files for ``nbytes`` in all, by shares. Raises ``AioError`` (ENOSPC) when they
        do not fit.
        """
        total = sum(volume.share for volume in self._volumes)
        with self._lock:
            for volume in self._volumes:
                due = int(nbytes * volume.share / total) // ALIGNMENT * ALIGNMENT
                if due > volume.nbytes:
                    self._grow(volume, due - volume.nbytes)

    def allocate(self, nbytes: int) -> Extent:
        """A new extent of ``nbytes`` or more, on the directory furthest behind its share of those
        that have room.

        Raises ``AioError`` (ENOSPC) when no directory has any.
        """
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            order = sorted(
                range(len(self._volumes)),
                key=lambda i: (self._volumes[i].used_bytes + nbytes) / self._volumes[i].share,
            )
            return self._allocate_on(order, nbytes)

    def release(self, extent: Extent) -> None:
        """Give the range back, now or when its last pin is gone."""
        with self._lock:
            if self._pins.get(extent, 0):
                self._doomed.add(extent)
            else:
                self._free(extent)

    def pin(self, extent: Extent) -> None:
        """Keep the bytes of ``extent`` as they are until ``unpin``."""
        with self._lock:
            self._pins[extent] = self._pins.get(extent, 0) + 1

    def unpin(self, extent: Extent) -> None:
        with self._lock:
            left = self._pins[extent] - 1
            if left:
                self._pins[extent] = left
                return
            del self._pins[extent]
            if extent in self._doomed:
                self._doomed.remove(extent)
                self._free(extent)

    def read(self, extent: Extent, start: int, buffer: Any, *, urgent: bool) -> Operation:
        """Read ``len(buffer)`` bytes from byte ``start`` of ``extent``; ``urgent`` reads have a
        lane of their own.
        """
        request = self._request("read", extent, start, buffer)
        lane = extent.directory + (0 if urgent else len(self._volumes))
        return self._engine.submit([request], lane=lane)[0]

    def write(self, extent: Extent, start: int, buffer: Any) -> Operation:
        """Write ``buffer`` at byte ``start`` of ``extent``; it is the engine's until reaped."""
        request = self._request("write", extent, start, buffer)
        lane = extent.directory + 2 * len(self._volumes)
        return self._engine.submit([request], lane=lane)[0]

    def close(self) -> None:
        """Remove the swap files. Idempotent; the engine must be idle."""
        for volume in self._volumes:
            volume.directory.close()

    def _request(self, kind: Any, extent: Extent, start: int, buffer: Any) -> Request:
        assert start >= 0
        assert start + memoryview(buffer).nbytes <= extent.nbytes
        volume = self._volumes[extent.directory]
        return Request(kind, volume.directory.file, extent.offset + start, buffer)

    def _allocate_on(self, order: Sequence[int], nbytes: int) -> Extent:
        for index in order:
            offset = self._volumes[index].ranges.allocate(nbytes)
            if offset is not None:
                return self._taken(Extent(index, offset, nbytes))
        failure: AioError | None = None
        # Disks with no room for a large step may still have enough for this extent.
        for is_large, index in itertools.product((True, False), order):
            volume = self._volumes[index]
            step = min(_GROWTH_BYTES, volume.nbytes // _GROWTH_PARTS // ALIGNMENT * ALIGNMENT)
            try:
                self._grow(volume, max(nbytes, step) if is_large else nbytes)
            except AioError as error:
                failure = failure or error
                continue
            offset = volume.ranges.allocate(nbytes)
            assert offset is not None
            return self._taken(Extent(index, offset, nbytes))
        assert failure is not None
        raise failure

    def _grow(self, volume: _Volume, nbytes: int) -> None:
        volume.directory.file.allocate(volume.nbytes, nbytes)
        volume.ranges.grow(nbytes)

    def _used_bytes(self) -> int:
        return sum(volume.used_bytes for volume in self._volumes)

    def _taken(self, extent: Extent) -> Extent:
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        return extent

    def _free(self, extent: Extent) -> None:
        volume = self._volumes[extent.directory]
        volume.ranges.release(extent.offset, extent.nbytes)
