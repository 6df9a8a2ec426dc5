"""The data files of one rank of a save: made, written, made durable, recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from aio import Engine, File
from checkpoint.directory.destination import Destination
from checkpoint.directory.files.attributes import attributes_at
from checkpoint.directory.files.replacing import open_new
from checkpoint.directory.files.space import check_space
from checkpoint.format.checksum import CRC_BLOCK_BYTES, crc32c
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.records import ChunkRecord, FileRecord
from checkpoint.plan.write_runs import Slots
from checkpoint.sheltered import Cancellation
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.memory import staging_slab
from checkpoint.transfer.writer import FileJob, FillingSupply, Supply, Writer


@dataclass(frozen=True, slots=True)
class RankRecords:
    """What one rank wrote: its data files, and the chunks in them by the tensor's index.

    `ChunkRecord.file` counts in `files`.
    """

    files: tuple[FileRecord, ...]
    chunks: dict[int, tuple[ChunkRecord, ...]]


class RankFiles:
    """The data files of one rank, from their plans to their records.

    The methods are called in the order in which they stand here.
    """

    def __init__(self, destination: Destination, rank: int, fillers: Sequence[Filler]) -> None:
        self._destination = destination
        self._rank = rank
        self._fillers = fillers
        self._files: list[File] = []

    def check_space(self) -> None:
        """Raises OSError (ENOSPC) if there is no room for the files."""
        check_space(
            (self._destination.root(filler.plan.number), filler.plan.layout.nbytes)
            for filler in self._fillers
        )

    def create(self, engine: Engine, undo: ExitStack) -> None:
        """Makes the files at their full size, to be read by those who may read the manifest that
        there was before. `undo` closes them, and removes none.
        """
        replaced = attributes_at(self._destination.path / MANIFEST_NAME)
        for filler in self._fillers:
            number = filler.plan.number
            relative = self._destination.relative_path(self._rank, number)
            path = self._destination.root(number) / relative
            file = open_new(engine, path, filler.plan.layout.nbytes, replaced)
            undo.callback(file.close)
            self._files.append(file)

    def write(
        self,
        engine: Engine,
        supplies: Sequence[Supply],
        on_staged: Callable[[], None] | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        """Writes every byte and checks every completion. Raises AioError or a source's error."""
        jobs = [
            FileJob(supply, file, filler.plan.number % engine.lanes)
            for supply, file, filler in zip(supplies, self._files, self._fillers, strict=True)
        ]
        Writer(engine, jobs, on_staged, cancellation).run()

    def sync(self) -> None:
        """Makes the data durable and closes the files. Raises AioError."""
        for file in self._files:
            file.sync()
            file.close()

    def records(self) -> RankRecords:
        """What was written; known as soon as everything has been summed."""
        files = []
        chunks: dict[int, tuple[ChunkRecord, ...]] = {}
        for index, filler in enumerate(self._fillers):
            files.append(self._file_record(filler))
            plan = filler.plan
            for (tensor, start, shape, _, nbytes), offset, sums in zip(
                plan.shards, plan.layout.offsets, filler.sums(), strict=True
            ):
                num_blocks = -(-nbytes // CRC_BLOCK_BYTES)
                assert len(sums[0]) == num_blocks, "a shard was not written whole"
                chunk = ChunkRecord(index, offset, nbytes, start, shape, *sums)
                chunks[tensor] = (*chunks[tensor], chunk) if tensor in chunks else (chunk,)
        return RankRecords(tuple(files), chunks)

    def _file_record(self, filler: Filler) -> FileRecord:
        number, layout = filler.plan.number, filler.plan.layout
        return FileRecord(
            self._destination.root_index(number),
            self._destination.relative_path(self._rank, number),
            layout.nbytes,
            len(layout.header),
            crc32c(layout.header),
        )


def filling_supplies(fillers: Sequence[Filler], slots: Sequence[Slots]) -> list[FillingSupply]:
    """Supplies that fill as they write, over staging memory of their own."""
    with staging_slab(sum(each.count * each.nbytes for each in slots)) as slab:
        return [
            FillingSupply(filler, each, slab) for filler, each in zip(fillers, slots, strict=True)
        ]


def merge_records(
    ranks: Sequence[RankRecords],
) -> tuple[tuple[FileRecord, ...], dict[int, tuple[ChunkRecord, ...]]]:
    """All ranks' files, each rank's numbered after those before, and the chunks by tensor."""
    files: list[FileRecord] = []
    chunks: dict[int, tuple[ChunkRecord, ...]] = {}
    for records in ranks:
        before = len(files)
        for tensor, own in records.chunks.items():
            moved = own
            if before:
                moved = tuple([chunk._replace(file=chunk.file + before) for chunk in own])
            chunks[tensor] = (*chunks[tensor], *moved) if tensor in chunks else moved
        files.extend(records.files)
    return tuple(files), chunks


def encode_records(records: RankRecords) -> dict[str, Any]:
    """What a rank wrote, as JSON."""
    return {
        "files": [
            [file.root, file.path, file.nbytes, file.header_nbytes, file.header_crc32c]
            for file in records.files
        ],
        "chunks": {
            str(tensor): [(*chunk[:-1], chunk.grains.hex()) for chunk in chunks]
            for tensor, chunks in records.chunks.items()
        },
    }


def decode_records(encoded: Mapping[str, Any]) -> RankRecords:
    """What `encode_records` was given."""
    return RankRecords(
        tuple(FileRecord(*fields) for fields in encoded["files"]),
        {
            int(tensor): tuple(_chunk(*fields) for fields in chunks)
            for tensor, chunks in encoded["chunks"].items()
        },
    )


def _chunk(
    file: int,
    offset: int,
    nbytes: int,
    start: list[int],
    shape: list[int],
    crc32c: list[int],
    grain_nbytes: int,
    grains: str,
) -> ChunkRecord:
    box, crcs = (tuple(start), tuple(shape)), tuple(crc32c)
    return ChunkRecord(file, offset, nbytes, *box, crcs, grain_nbytes, bytes.fromhex(grains))
