"""Reads stored tensors of one checkpoint into targets."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from aio import Engine
from aio.process.threads import begun
from checkpoint.collector import paused_collector
from checkpoint.directory.locate import check_data_file
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.records import Manifest
from checkpoint.format.slices import merged
from checkpoint.sheltered import StoppedError
from checkpoint.tensors.targets import Place, Target
from checkpoint.threads import started
from checkpoint.transfer.reader import ChunkRead, FileReads, Reader, ReadOptions

T = TypeVar("T")
MAX_LANES = 16


class TensorRead(NamedTuple):
    """Stored tensor number `tensor`, all of it, into `target`."""

    tensor: int
    target: Target


PlacedRead = tuple[ChunkRead, Place | None]
"""A read, and where its chunk goes; None if it is only to be verified."""


def read_tensors(
    manifest: Manifest, checkpoint: Path, reads: Iterable[TensorRead], options: ReadOptions
) -> None:
    """Reads in parallel over the data files; returns when every byte is where it belongs.

    Raises CorruptCheckpointError naming file, tensor and extent, OSError, or what a sink raised.
    """
    by_file: dict[int, list[PlacedRead]] = defaultdict(list)
    for read in reads:
        record = manifest.tensors[read.tensor]
        for chunk in record.chunks:
            if chunk.nbytes:
                place = read.target.place(chunk.start, chunk.shape)
                ranges = read.target.wanted(chunk.start, chunk.shape)
                unit = chunk.unit_nbytes if options.verify else ALIGNMENT
                for first, last in merged(ranges, unit):
                    wanted = ChunkRead(record.name, chunk, first, last)
                    by_file[chunk.file].append((wanted, place))
    read_files(manifest, checkpoint, by_file, options)


def read_files(
    manifest: Manifest,
    checkpoint: Path,
    by_file: Mapping[int, list[PlacedRead]],
    options: ReadOptions,
    problems: list[CorruptCheckpointError] | None = None,
) -> None:
    """Reads what is wanted of each data file, by its number in the manifest.

    With `problems` damage is added to that list, and what can still be read is read.
    """
    paths = _check_files(manifest, checkpoint, by_file, problems)
    options.begins()
    with _engine(options, len(paths)) as engine:
        files = []
        for lane, (number, path) in enumerate(paths.items()):
            placed = sorted(by_file[number], key=lambda item: (item[0].chunk.offset, item[0].first))
            reads, places = [read for read, _ in placed], [place for _, place in placed]
            files.append(
                FileReads(
                    path, manifest.files[number], lane % engine.lanes, reads, partial(_same, places)
                )
            )
        Reader(engine, files, options, problems).run()


def read_while_assembling(
    manifest: Manifest,
    checkpoint: Path,
    assemble: Callable[[], tuple[T, Mapping[int, Target]]],
    options: ReadOptions,
) -> T:
    """Reads every tensor into the targets, by index, that `assemble` gives beside its result.

    Reading begins at once. With many small tensors the memory for them is made while the first
    bytes are on their way. Raises what `assemble` raises, or what `read_tensors` does.
    """
    by_file = _whole_files(manifest)
    try:
        paths = _check_files(manifest, checkpoint, by_file, None)
    except CorruptCheckpointError:
        assemble()  # what is wrong with the manifest itself is told first
        raise
    options.begins()
    awaited = _AwaitedPlaces()
    with _engine(options, len(paths)) as engine:
        files = []
        for lane, (number, path) in enumerate(paths.items()):
            record = manifest.files[number]
            reads = [read for _, read in by_file[number]]
            places = partial(awaited.get, number)
            files.append(FileReads(path, record, lane % engine.lanes, reads, places, early=True))
        reader = Reader(engine, files, options)
        with _in_background(reader):
            try:
                result, targets = assemble()
                awaited.set(_places_of(by_file, targets))
            except BaseException:
                awaited.give_up()
                raise
    return result


_IndexedRead = tuple[int, ChunkRead]
"""The index of a tensor, and the read of one of its chunks."""


@paused_collector()
def _whole_files(manifest: Manifest) -> dict[int, list[_IndexedRead]]:
    """All chunks of all tensors, by file, in its order."""
    by_file: dict[int, list[_IndexedRead]] = defaultdict(list)
    for index, record in enumerate(manifest.tensors):
        for chunk in record.chunks:
            if chunk.nbytes:
                read = ChunkRead(record.name, chunk, 0, chunk.nbytes)
                by_file[chunk.file].append((index, read))
    for reads in by_file.values():
        reads.sort(key=lambda item: item[1].chunk.offset)
    return by_file


@paused_collector()
def _places_of(
    by_file: Mapping[int, list[_IndexedRead]], targets: Mapping[int, Target]
) -> dict[int, list[Place | None]]:
    places: dict[int, list[Place | None]] = {}
    for number, reads in by_file.items():
        places[number] = [
            targets[index].place(read.chunk.start, read.chunk.shape) if index in targets else None
            for index, read in reads
        ]
    return places


class _AwaitedPlaces:
    """Places that the readers of files ask for before they are known."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._places: Mapping[int, list[Place | None]] | None = None

    def set(self, places: Mapping[int, list[Place | None]]) -> None:
        self._places = places
        self._known.set()

    def give_up(self) -> None:
        """There will be no places."""
        self._known.set()

    def get(self, number: int) -> list[Place | None]:
        """Waits for the places of a file's reads. Raises StoppedError if there will be none."""
        self._known.wait()
        if self._places is None:
            raise StoppedError
        return self._places[number]


@contextmanager
def _in_background(reader: Reader) -> Iterator[None]:
    """Runs a reader during the block and waits for it. An error of the block comes first."""
    errors: list[BaseException | None] = [None]  # a place for it: there may be no memory for one

    def run() -> None:
        try:
            begun()
            reader.run()
        except BaseException as error:
            errors[0] = error

    thread = started(run, "checkpoint-read")
    try:
        yield
        thread.join()
    except BaseException:
        reader.stop()
        thread.join()
        errors.clear()  # an error leads to the function that has this list
        raise
    if (failure := errors.pop()) is not None:
        try:
            raise failure
        finally:
            del failure


def _check_files(
    manifest: Manifest,
    checkpoint: Path,
    numbers: Iterable[int],
    problems: list[CorruptCheckpointError] | None,
) -> dict[int, Path]:
    """Paths of data files that are what the manifest says."""
    paths = {}
    for number in sorted(numbers):
        try:
            paths[number] = check_data_file(manifest, checkpoint, manifest.files[number])
        except CorruptCheckpointError as error:
            if problems is None:
                raise
            problems.append(error)
    return paths


@contextmanager
def _engine(options: ReadOptions, num_files: int) -> Iterator[Engine]:
    """The caller's engine, or one with a lane per file for the time of the block."""
    if options.engine is not None:
        yield options.engine
        return
    with Engine(lanes=max(1, min(num_files, MAX_LANES))) as engine:
        yield engine


def _same(places: list[Place | None]) -> list[Place | None]:
    return places
