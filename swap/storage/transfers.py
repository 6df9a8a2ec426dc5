"""Requests for parts of extents, and the checksums of what they move where these are kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal
from weakref import WeakMethod

import numpy as np

from aio import Engine, Operation, Request
from swap.storage.checksums import BlockSums, Damage, Owner, checked_read, summed_write, zero_sums
from swap.storage.joined import JoinedOperation
from swap.storage.volumes import ALIGNMENT, Extent, Volume, parts_of

Kind = Literal["read", "write"]


class Transfers:
    """Over ``volumes``, the first of which are there from the beginning: those that extents are
    allocated from. Each has a lane of the engine for each use.
    """

    def __init__(self, volumes: list[Volume], engine: Engine, *, verify: bool) -> None:
        self.verifies = verify
        self._volumes = volumes
        self._lanes_per_use = len(volumes)
        self._engine = engine
        self._owners: list[WeakMethod[Owner]] = []
        for volume in volumes:
            volume.sums = BlockSums() if verify else None

    def add(self, volume: Volume) -> None:
        """The file of another process, which is only read. Nothing is known of its bytes yet."""
        volume.sums = BlockSums() if self.verifies else None
        self._volumes.append(volume)

    def zero(self, extent: Extent) -> bool:
        """Make it zeros without writing them; False where a file system cannot."""
        for piece in extent.ranges:
            volume = self._volumes[piece.directory]
            if volume.sums is not None:
                volume.sums.forget(piece.offset, piece.nbytes)
            if not volume.file.zero(piece.offset, piece.nbytes):
                return False
            if volume.sums is not None:
                volume.sums.put(piece.offset, zero_sums(piece.nbytes))
        return True

    @property
    def checksum_bytes(self) -> int:
        """Memory that checksums take."""
        return sum(volume.sums.nbytes for volume in self._volumes if volume.sums is not None)

    def tell_owner(self, owner: Owner) -> None:
        """Errors about damaged bytes ask ``owner``, a method, whose these are."""
        self._owners.append(WeakMethod(owner))

    def sums(self, extent: Extent) -> list[np.ndarray]:
        """What is known of the bytes in each range of ``extent``, see ``BlockSums``; none where
        nothing is verified.
        """
        known = ((self._volumes[piece.directory].sums, piece) for piece in extent.ranges)
        return [sums.of(piece.offset, piece.nbytes) for sums, piece in known if sums is not None]

    def note_sums(self, extent: Extent, known: Iterable[np.ndarray]) -> None:
        """What ``sums`` gave of the same bytes, be it of another extent, or at another time."""
        if not self.verifies:
            return
        rest = np.concatenate([*known])
        for piece in extent.ranges:
            sums, blocks = self._volumes[piece.directory].sums, piece.nbytes // ALIGNMENT
            assert sums is not None
            sums.put(piece.offset, rest[:blocks])
            rest = rest[blocks:]

    def is_one_request(self, extent: Extent) -> bool:
        """Whether ``start`` begins one operation; else an interrupt may come between several."""
        return not (extent.pieces or self.verifies)

    def start(
        self, kind: Kind, extent: Extent, start: int, buffer: Any, use: int, *, as_is: bool = False
    ) -> Operation:
        """A transfer from byte ``start`` of ``extent`` on; ``use``: which of a directory's lanes.
        ``as_is``: what is read is not compared with anything.
        """
        assert start >= 0
        assert start + memoryview(buffer).nbytes <= extent.nbytes
        if not extent.pieces:
            return self._begin(self._request(kind, extent, start, buffer), extent, use, as_is)
        whole = self._request(kind, extent.pieces[0], start, buffer)
        operations: list[Operation] = []
        for piece, first, part in parts_of(extent, start, buffer):
            request = self._request(kind, piece, first, part)
            operations.append(self._begin(request, piece, use, as_is))
        return JoinedOperation(whole, operations)

    def _request(self, kind: Kind, extent: Extent, start: int, buffer: Any) -> Request:
        file = self._volumes[extent.directory].file
        return Request(kind, file, extent.offset + start, buffer)

    def _begin(self, request: Request, extent: Extent, use: int, as_is: bool) -> Operation:
        submit = partial(self._submit, extent, use)
        sums = self._volumes[extent.directory].sums
        if sums is None or (as_is and request.kind == "read"):
            return submit(request)
        if request.kind == "write":
            return summed_write(request, submit, sums)
        damage = Damage(request.file, partial(self._owner_of, extent.directory))
        return checked_read(request, submit, sums, damage)

    def _submit(self, extent: Extent, use: int, request: Request) -> Operation:
        lane = self._volumes[extent.directory].lane + use * self._lanes_per_use
        return self._engine.submit([request], lane=lane)[0]

    def _owner_of(self, directory: int, offset: int) -> str:
        owners = [owner for known in self._owners if (owner := known()) is not None]
        found = (owner(directory, offset) for owner in owners)
        return next((name for name in found if name), "nothing has them any more")
