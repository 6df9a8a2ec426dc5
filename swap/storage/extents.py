"""Space on the SSDs, and copy-on-write over it.

An extent is a range of one swap file. It is written once after it was allocated and then only read;
new values go to a new extent, and the old one is released when the new one is complete.

The files grow by ``fallocate`` in large steps: a full disk is an error before the first byte of a
write-back. Sizes differ, so free space comes to lie in many ranges; where the files cannot grow, an
extent is put together from several. So whether there is room is a matter of bytes alone.

An extent that is pinned stays, and must not be written to, until it is unpinned. Files of other
processes may be adopted: what is in them is read, never written, and what nothing keeps any more
goes back to the file system, once the caller says that all that others need of them is pinned.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aio import AioError, Engine, File, Operation
from aio.errors import is_no_room, let_go
from swap.interruptions.forks import note
from swap.interruptions.undo import Undo, behind
from swap.storage.drives.directory import SwapDirectory
from swap.storage.pins import Pins
from swap.storage.transfers import Kind, Transfers
from swap.storage.volumes import ALIGNMENT, Extent, SharedFile, Volume, grown_anywhere, side_by_side

__all__ = ["ALIGNMENT", "Extent", "ExtentStore"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.001
_GROWTH_BYTES = 64 * 1024 * 1024
_GROWTH_PARTS = 16
"""Steps are large, but a small part of what a file has, so that it takes little more than it needs.
"""


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
        verify: bool = False,
    ) -> None:
        """``verify``: what is read is compared with what was written, see ``checksums``."""
        shares = shares or [1.0] * len(directories)
        self._volumes = [
            Volume(d.path.name, d.file, lane, share, directory=d)
            for lane, (d, share) in enumerate(zip(directories, shares, strict=True))
        ]
        self._own = tuple(self._volumes)  # extents are allocated from; adopted ones come after
        self._adopted = Undo()
        self._adopted_may_go = False
        note(self)
        self._pins: Pins[Extent] = Pins()
        self._engine = engine
        self.transfers = Transfers(self._volumes, engine, verify=verify)
        self._doomed: set[Extent] = set()
        self._may_be_in_flight = False
        """A transfer that nobody waited for, as `run_drained` says: nothing is given back."""
        self._lock = threading.Lock()
        self._peak_bytes = 0

    @property
    def num_directories(self) -> int:
        return len(self._own)

    @property
    def folders(self) -> list[Path]:
        """Of the swap files."""
        return [volume.file.path.parent for volume in self._own]

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reserve(self, nbytes: int) -> None:
        """Grow the files for ``nbytes`` in all, by shares; what does not fit on one disk goes to
        the others. Raises ``AioError`` (ENOSPC and its like) when they do not fit.
        """
        total = sum(volume.share for volume in self._own)
        failure: AioError | None = None
        with self._lock:
            for volume in self._own:
                due = int(nbytes * volume.share / total) // ALIGNMENT * ALIGNMENT
                try:
                    if due > volume.nbytes:
                        volume.grow(due - volume.nbytes)
                except AioError as error:
                    if not is_no_room(error):
                        raise
                    failure = failure or error
            missing = nbytes - sum(volume.nbytes for volume in self._own)
            missing = -(-missing // ALIGNMENT) * ALIGNMENT
            if failure is None or missing <= 0:
                return
            missing = grown_anywhere(self._own, missing)
            if missing:
                raise AioError(
                    f"{failure}; the swap files take {nbytes} bytes over "
                    f"{len(self._own)} directories, {missing} of which have no room: make "
                    "room (infinity snapshots DIR ... lists restore points, and drops them), add a "
                    "directory, or raise host_memory",
                    errno=failure.errno or 0,
                    filename=failure.filename,
                    nbytes=nbytes,
                ) from failure

    def allocate(self, nbytes: int) -> Extent:
        """A new extent of ``nbytes`` or more, on the directory furthest behind its share of those
        that have room.

        Raises ``AioError`` (ENOSPC) when the directories do not have as much between them.
        """
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._may_be_in_flight:
            self.drain()
        with self._lock:
            order = self._order(nbytes)
            preferred = self._preferred(order)
            if preferred:
                with suppress(AioError):  # no room there
                    return self._allocate_on(preferred, nbytes)
            return self._allocate_on(order, nbytes)

    def allocate_adjacent(self, sizes: Sequence[int]) -> list[Extent] | None:
        """New extents of those sizes, multiples of ``ALIGNMENT``, one right behind the other; each
        is released by itself. None where no free range has room for all: files do not grow for it.
        """
        nbytes = sum(sizes)
        if self._may_be_in_flight:
            self.drain()
        with self._lock:
            order = self._order(nbytes)
            for index in self._preferred(order) or order:
                ranges = self._own[index].ranges
                offset = ranges.allocate(nbytes)
                if offset is not None:
                    self._taken(Extent(index, offset, nbytes))
                    offsets = ranges.split(offset, sizes)
                    return list(map(Extent, itertools.repeat(index), offsets, sizes))
        return None

    def release(self, extent: Extent) -> None:
        """Give the range back, as soon as no transfer may be in flight that nobody waited for."""
        self.release_all((extent,))

    def release_all(self, extents: Iterable[Extent]) -> None:
        """As ``release``, of several."""
        with self._lock:
            self._give_back([extent for extent in extents if self._pins.let_go(extent)])

    def avoid(self, failure: AioError) -> None:
        """A write of a new extent has failed: from now on new ones go to the other directories, as
        far as these have room, so that a step that was stopped can be finished there.
        """
        with self._lock:
            usable = [volume for volume in self._own if not volume.is_avoided]
            for volume in usable:
                if os.fspath(volume.file.path) == failure.filename and len(usable) > 1:
                    volume.is_avoided = True
                    _log.warning(
                        "%s; until the block ends new values go to the other nvme directories, "
                        "as far as they have room",
                        failure,
                    )

    def pin(self, extents: Iterable[Extent], *, are_used: bool) -> None:
        """Keep ``extents`` as they are until they are unpinned; ``are_used``: somebody will also
        ``release`` them, if they were not pinned before.
        """
        with self._lock:
            for extent in extents:
                self._pins.pin(extent, is_used=are_used)

    def unpin(self, extents: Iterable[Extent]) -> None:
        """Undo one ``pin``: what was released meanwhile is given back."""
        with self._lock:
            self._give_back([extent for extent in extents if self._pins.unpin(extent)])

    def use(self, extent: Extent) -> None:
        """A pinned extent has somebody again who will ``release`` it."""
        with self._lock:
            self._pins.use(extent)

    def is_fixed(self, extent: Extent) -> bool:
        """Whether what is in it must stay as it is."""
        with self._lock:
            return extent in self._pins or any(
                self._volumes[piece.directory].directory is None for piece in extent.ranges
            )

    def adopt(self, name: str, path: Path, lane: int) -> None:
        """Open the swap file ``name`` of another process, on the SSD of directory ``lane``, until
        ``close_adopted``. Its extents have to be pinned before they are used.
        """
        with self._lock:
            holes = SharedFile(path)  # through which ranges go back
            self._adopted.callback(holes.close)
            file = self._engine.open(path, "r")
            self._adopted.callback(file.close)
            self.transfers.add(Volume(name, file, lane, holes=holes))

    def let_adopted_go(self, may_go: bool) -> None:
        """Whether what nothing keeps of adopted files goes back from now on: only as long as all
        that others need of them is pinned. What is let go of meanwhile stays as it is.
        """
        with self._lock:
            self._adopted_may_go = may_go

    @property
    def names(self) -> list[str]:
        """What tells files from all others, by the number that extents in them have."""
        return [volume.name for volume in self._volumes]

    def own_files(self, extents: Iterable[Extent]) -> list[File]:
        """The files of this process that ``extents`` are in."""
        used = {piece.directory for extent in extents for piece in extent.ranges}
        return [volume.file for number, volume in enumerate(self._own) if number in used]

    def read(
        self, extent: Extent, start: int, buffer: Any, *, urgent: bool, as_is: bool = False
    ) -> Operation:
        """Read ``len(buffer)`` bytes from byte ``start`` of ``extent``; ``urgent`` reads have a
        lane of their own. Of a store that verifies, unless they are to be had ``as_is``, waiting
        for them raises ``CorruptSwapError`` where they are not what was written.
        """
        return self._start("read", extent, start, buffer, 0 if urgent else 1, as_is=as_is)

    def write(self, extent: Extent, start: int, buffer: Any) -> Operation:
        """Write ``buffer`` at byte ``start`` of ``extent``; it is the engine's until reaped."""
        return self._start("write", extent, start, buffer, 2)

    def release_others(self, known: Iterable[Extent]) -> None:
        """Give back every extent but ``known`` ones, after an interrupt that may have
        lost sight of some. The caller knows all of them, and no transfer is under way.
        """
        with self._lock:
            kept: list[list[int]] = [[] for _ in self._volumes]
            for extent in (*known, *self._pins):
                for piece in extent.ranges:
                    kept[piece.directory].append(piece.offset)
            self._doomed.clear()
            for volume, offsets in zip(self._volumes, kept, strict=True):
                volume.ranges.release_others(offsets)

    def run_drained(self, action: Callable[[], T]) -> T:
        """Run ``action``, which begins transfers and takes note of their operations.

        When it raises, every transfer has ended before what it raised goes on: also one whose
        operation an interrupt kept from being noted, and however many interrupts come. Where
        waiting is refused (in a callback of the engine, and in a forked child, whose transfers are
        the parent's), the refusal is the last in the context of what it raised, and no range of the
        SSDs is given back before a later ``drain``.
        """
        try:
            return action()
        except BaseException as failure:
            # Not in a function of its own, see ``run_apart``: the second of two signals comes up
            # at the very next call.
            while True:
                try:
                    self.drain()
                    break
                except MemoryError:  # what is under way frees some
                    time.sleep(_PAUSE_SECONDS)
                except Exception as refusal:  # of whatever kind: what is under way is not known
                    self._may_be_in_flight, refusal.__context__ = True, None
                    behind(failure, let_go(refusal))
                    break
                except BaseException:  # one is on its way, which says so
                    pass
            raise

    def drain(self) -> None:
        """Wait until every transfer that was begun has ended, also one whose operation an interrupt
        kept from its caller. What became of it is not told. Raises ``RuntimeError`` where there is
        no waiting, see ``aio.Engine.drain``.
        """
        self._engine.drain()
        if self._may_be_in_flight:
            with self._lock:
                self._may_be_in_flight = False
                while self._doomed:
                    self._free((self._doomed.pop(),))

    def close_adopted(self) -> None:
        """Close the swap files of other processes. Idempotent; the engine must be idle."""
        self._adopted.close()

    def after_fork(self) -> None:
        self.close_adopted()  # a file that is removed is to have no space because of a child

    def _start(self, kind: Kind, extent: Extent, *given: Any, as_is: bool = False) -> Operation:
        begin = partial(self.transfers.start, kind, extent, *given, as_is=as_is)
        # What is under way must not outlive the caller's hold on the buffer.
        return begin() if self.transfers.is_one_request(extent) else self.run_drained(begin)

    def _order(self, nbytes: int) -> list[int]:
        """Directories, with the one that is furthest behind its share first."""
        return sorted(
            range(len(self._own)),
            key=lambda i: (self._own[i].used_bytes + nbytes) / self._own[i].share,
        )

    def _preferred(self, order: Sequence[int]) -> list[int]:
        """Those of ``order`` that are not avoided, where some are."""
        kept = [index for index in order if not self._own[index].is_avoided]
        return kept if len(kept) < len(order) else []

    def _allocate_on(self, order: Sequence[int], nbytes: int) -> Extent:
        for index in order:
            offset = self._volumes[index].ranges.allocate(nbytes)
            if offset is not None:
                return self._taken(Extent(index, offset, nbytes))
        failures: list[AioError] = []
        # Disks with no room for a large step may still have enough for this extent.
        for is_large, index in itertools.product((True, False), order):
            volume = self._volumes[index]
            step = min(_GROWTH_BYTES, volume.nbytes // _GROWTH_PARTS // ALIGNMENT * ALIGNMENT)
            try:
                volume.grow(max(nbytes, step) if is_large else nbytes)
            except AioError as error:
                failures.append(error)
                continue
            offset = volume.ranges.allocate(nbytes)
            assert offset is not None
            return self._taken(Extent(index, offset, nbytes))
        missing = nbytes - sum(self._volumes[index].ranges.free_bytes for index in order)
        if missing > 0 and grown_anywhere([self._volumes[index] for index in order], missing):
            raise failures.pop(0)
        return self._taken(self._put_together(order, nbytes))

    def _put_together(self, order: Sequence[int], nbytes: int) -> Extent:
        """Of the largest free ranges, which have room for it among them."""
        pieces: list[Extent] = []
        while nbytes:
            index = max(order, key=lambda i: self._volumes[i].ranges.largest_free_bytes)
            ranges = self._volumes[index].ranges
            size = min(nbytes, ranges.largest_free_bytes)
            offset = ranges.allocate(size)
            assert offset is not None
            pieces.append(Extent(index, offset, size))
            nbytes -= size
        if len(pieces) == 1:
            return pieces[0]
        total = sum(piece.nbytes for piece in pieces)
        return Extent(pieces[0].directory, pieces[0].offset, total, tuple(pieces))

    def _used_bytes(self) -> int:
        return sum(volume.used_bytes for volume in self._own)

    def _taken(self, extent: Extent) -> Extent:
        self._peak_bytes = max(self._peak_bytes, self._used_bytes())
        return extent

    def _give_back(self, extents: Iterable[Extent]) -> None:
        if self._may_be_in_flight:
            self._doomed.update(extents)
        else:
            self._free(extents)

    def _free(self, extents: Iterable[Extent]) -> None:
        """Those side by side at once, as they were allocated."""
        pieces = [piece for extent in extents for piece in extent.pieces or (extent,)]
        for run in side_by_side(pieces):
            volume = self._volumes[run[0].directory]
            if volume.directory is not None or self._adopted_may_go:
                volume.give_back(run[0].offset, *(piece.nbytes for piece in run))
