"""Makes a checkpoint of several ranks durable: the order of `commit`, with a meeting of the ranks
after each stage.

Rank 0 locks the checkpoint, makes its directories and publishes the manifest; every rank writes and
syncs its own data files. Invariant: whatever fails on one rank ends the save on all of them, with
what failed first, before the manifest is published; the checkpoint that was there stays. A rank
that is killed leaves the others with an error at the next meeting; what it left is removed by rank
0, or by the next save. So whatever can fail between two meetings is done by `together` or `apart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from aio import Engine, sync_directory
from checkpoint.directory.generations import clear_leftovers, create_generation, discard_generation
from checkpoint.directory.lock import locked
from checkpoint.format.manifest import encode_manifest
from checkpoint.format.records import ChunkRecord, FileRecord, Manifest
from checkpoint.plan.readable import check_files
from checkpoint.ranks.coordinator import Coordinator, together
from checkpoint.saving.commit import (
    SavePlan,
    check_replaceable,
    manifest_of,
    new_directory,
    publish,
    supplies_of,
)
from checkpoint.saving.data_files import RankFiles, RankRecords
from checkpoint.transfer.snapshot import EarlyStage, copy_errors


def commit_ranks(
    plan: SavePlan,
    engine: Engine,
    coordinator: Coordinator,
    on_staged: Callable[[], None] | None = None,
    early: EarlyStage | None = None,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Writes the plan together with the other ranks; gives the fields of a `SaveInfo` in numbers.
    Every rank calls `begin` first.

    Raises what `commit` does on the rank where it happened, RankFailedError on the others.
    """
    is_first = coordinator.rank == 0
    destination = plan.destination
    files = RankFiles(destination, coordinator.rank, plan.fillers)
    ranks = plan.ranks
    assert ranks is not None
    with ExitStack() as held, ExitStack() as undo:
        # 0. and 1. Room, the lock, directories.
        def prepare() -> None:
            begin()
            if is_first:
                _prepare(plan, held, undo)

        together(coordinator, prepare)
        # 2. Files at their full size: a full disk shows here.
        together(coordinator, lambda: _create(files, engine, undo))
        # 3. to 6. Write; the data durable, and their names.
        staged = on_staged or (lambda: None)

        def write() -> Any:
            with copy_errors(early):
                supplies = supplies_of(plan, early)
                files.write(engine, supplies, staged, plan.cancellation)
            files.sync()
            for directory in destination.data_directories:
                sync_directory(directory)
            plan.cancellation.check()
            return encode_records(ranks.by_tensor(files.records()))

        # 7. Every rank has got here, or none goes on.
        every = together(coordinator, write)
        # 8. to 11. The manifest.
        numbers = together(coordinator, lambda: _publish(plan, every, undo) if is_first else {})
    return numbers[0]


def _prepare(plan: SavePlan, held: ExitStack, undo: ExitStack) -> None:
    destination, path = plan.destination, plan.path
    held.enter_context(new_directory(path))
    held.enter_context(locked(path, make=True))
    check_replaceable(path)
    clear_leftovers(path, destination.stripes)
    undo.callback(discard_generation, path, destination.uuid)
    for directory in create_generation(path, destination.uuid, destination.stripe_directories):
        sync_directory(directory)


def _create(files: RankFiles, engine: Engine, undo: ExitStack) -> None:
    files.check_space()
    files.create(engine, undo)


def _publish(plan: SavePlan, every: Sequence[Any], undo: ExitStack) -> dict[str, int]:
    manifest = manifest_of(plan, [decode_records(records) for records in every])
    raw = encode_manifest(manifest, plan.state.tree_text)
    check_files(manifest, plan.path)
    publish(plan.destination, raw, undo)
    return numbers_of(manifest)


def numbers_of(manifest: Manifest) -> dict[str, int]:
    """The fields of a `SaveInfo` that count things."""
    return {
        "nbytes": manifest.nbytes,
        "file_nbytes": sum(file.nbytes for file in manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_files": len(manifest.files),
    }


def encode_records(records: RankRecords) -> dict[str, Any]:
    """What a rank wrote, as JSON."""
    return {
        "files": [
            [file.root, file.path, file.nbytes, file.header_nbytes, file.header_crc32c]
            for file in records.files
        ],
        "chunks": {str(tensor): chunks for tensor, chunks in records.chunks.items()},
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
    file: int, offset: int, nbytes: int, start: list[int], shape: list[int], crc32c: list[int]
) -> ChunkRecord:
    return ChunkRecord(file, offset, nbytes, tuple(start), tuple(shape), tuple(crc32c))
