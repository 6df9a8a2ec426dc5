"""Reads stored tensors of one checkpoint into targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aio import Engine
from checkpoint.collector import paused_collector
from checkpoint.errors import CorruptCheckpointError
from checkpoint.locate import check_data_file
from checkpoint.reader import ChunkRead, FileReads, Reader, ReadOptions
from checkpoint.records import Manifest
from checkpoint.targets import Target

MAX_LANES = 16


@dataclass(frozen=True, slots=True)
class TensorRead:
    """Stored tensor `index`, all of it, into `target`."""

    index: int
    target: Target


def read_tensors(
    manifest: Manifest, checkpoint: Path, reads: Iterable[TensorRead], options: ReadOptions
) -> None:
    """Reads in parallel over the data files; returns when every byte is where it belongs.

    Raises CorruptCheckpointError naming file, tensor and extent, OSError, or what a sink raised.
    """
    read_files(manifest, checkpoint, _chunk_reads(manifest, reads), options)


@paused_collector()
def _chunk_reads(manifest: Manifest, reads: Iterable[TensorRead]) -> dict[int, list[ChunkRead]]:
    """What to read, by the number of the file it is in."""
    by_file: dict[int, list[ChunkRead]] = defaultdict(list)
    for read in reads:
        record = manifest.tensors[read.index]
        for chunk in record.chunks:
            if chunk.nbytes:
                place = read.target.place(chunk.start, chunk.shape)
                by_file[chunk.file].append(ChunkRead(record.name, chunk, 0, chunk.nbytes, place))
    return by_file


def read_files(
    manifest: Manifest,
    checkpoint: Path,
    by_file: dict[int, list[ChunkRead]],
    options: ReadOptions,
    problems: list[CorruptCheckpointError] | None = None,
) -> None:
    """Reads what is wanted of each data file, by its number in the manifest.

    With `problems` damage is added to that list, and what can still be read is read.
    """
    paths = {}
    for number in sorted(by_file):
        try:
            paths[number] = check_data_file(manifest, checkpoint, manifest.files[number])
        except CorruptCheckpointError as error:
            if problems is None:
                raise
            problems.append(error)
    if not paths:
        return
    with ExitStack() as stack:
        engine = options.engine
        if engine is None:
            engine = stack.enter_context(Engine(lanes=min(len(paths), MAX_LANES)))
        files = [
            FileReads(
                path,
                manifest.files[number],
                lane % engine.lanes,
                tuple(sorted(by_file[number], key=lambda read: read.chunk.offset)),
            )
            for lane, (number, path) in enumerate(paths.items())
        ]
        Reader(engine, files, options, problems).run()
