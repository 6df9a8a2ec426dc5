"""Writes and reads of the engine alone: what the disks give, without a checkpoint around it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np

from aio import Engine, File, Operation, Request, Slab
from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import CheckError, State
from checkpoint.bench.systems.system import Loaded, SaveTimes, Stopwatch, System

_REQUEST_BYTES = 16 << 20
_BUFFER_BYTES = 64 << 20
_ALIGNMENT = 4096


class Raw(System):
    """The bytes of a state in one file per directory, from and to memory that is ready.

    Files are made and their space is reserved before the time counts. With `num_shares` each
    directory gets that part of the bytes, however many directories there are.
    """

    name = "raw"
    has_tensors = False

    def __init__(self, setting: Setting, *, num_shares: int | None = None) -> None:
        self.setting = setting
        self._num_shares = num_shares

    def save(self, state: State, place: Place) -> SaveTimes:
        part = part_bytes(state.nbytes, self._num_shares or len(place.folders))
        with self._open(place, "x", part) as (engine, files), Slab(_BUFFER_BYTES) as slab:
            buffer = slab.allocate(min(part, _BUFFER_BYTES))
            buffer[:] = _pattern(len(buffer))
            watch = Stopwatch()
            for operation in _submit(engine, "write", files, part, buffer):
                operation.result()
            returned = watch.seconds()
            with ThreadPoolExecutor(len(files)) as pool:
                list(pool.map(File.sync, files))
            return SaveTimes(part * len(files), returned, watch.seconds())

    def load(self, state: State, place: Place) -> Loaded:
        part = part_bytes(state.nbytes, self._num_shares or len(place.folders))
        with self._open(place, "r", part) as (engine, files), Slab(_BUFFER_BYTES) as slab:
            buffer = slab.allocate(min(part, _BUFFER_BYTES))
            buffer[:] = 0
            watch = Stopwatch()
            for operation in _submit(engine, "read", files, part, buffer):
                operation.result()
            seconds = watch.seconds()
            if not np.array_equal(buffer, _pattern(len(buffer))):
                raise CheckError("raw reads did not bring back what raw writes wrote")
        return Loaded(part * len(files), seconds, None)

    @contextmanager
    def _open(self, place: Place, mode: str, part: int) -> Iterator[tuple[Engine, list[File]]]:
        with ExitStack() as stack:
            engine = stack.enter_context(self.setting.engine(len(place.folders)))
            files = []
            for folder in place.folders:
                path = folder / "raw"
                file = engine.open(path, "x", size=part) if mode == "x" else engine.open(path)
                files.append(stack.enter_context(file))
            yield engine, files


def part_bytes(nbytes: int, num_directories: int) -> int:
    """What each directory gets of `nbytes`: an equal share, in whole pages."""
    return max(nbytes // num_directories // _ALIGNMENT, 1) * _ALIGNMENT


def _submit(
    engine: Engine, kind: str, files: list[File], part: int, buffer: np.ndarray
) -> list[Operation]:
    """Requests for all of the files in turn, each file on the lanes that are its own."""
    operations = []
    for offset in range(0, part, _REQUEST_BYTES):
        nbytes = min(_REQUEST_BYTES, part - offset)
        place = offset % _BUFFER_BYTES
        for number, file in enumerate(files):
            lanes = range(number, engine.lanes, len(files)) or [number % engine.lanes]
            lane = lanes[offset // _REQUEST_BYTES % len(lanes)]
            data = buffer[place : place + nbytes]
            request = Request("write" if kind == "write" else "read", file, offset, data)
            operations += engine.submit([request], lane=lane)
    return operations


def _pattern(nbytes: int) -> np.ndarray:
    """Bytes that do not compress, the same ones every time."""
    words = np.random.Generator(np.random.SFC64(1)).integers(0, 1 << 64, nbytes // 8, np.uint64)
    return words.view(np.uint8)
