"""Makes a planned checkpoint durable: the one place where the order of a save is decided.

One process is a rank among one. Rank 0 locks the checkpoint, makes its directories and publishes
the manifest; every rank writes and syncs its own data files. The ranks meet after each stage. DCP
has its own way of meeting, and takes the same stages: `Generation` on rank 0, `write_files` on all.

Invariants: until the rename the old checkpoint is whole and the new one does not exist; after it
the reverse; nothing is deleted before the directory that holds the rename is durable. A failure
before the rename removes everything the save made; whether the rename happened is asked of the
directory itself. Whatever fails on one rank ends the save on all of them, with what failed first,
so whatever can fail between two meetings is done by `together`. A rank that is killed leaves the
others with an error at the next meeting; what it left is removed by rank 0, or by the next save.
The order is that of docs/FORMAT.md, section 8.

A commit runs where no signal handler does, see `checkpoint.sheltered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio import Engine, sync_directory
from checkpoint.collector import paused_collector
from checkpoint.directory.destination import Destination
from checkpoint.format.manifest import encode_manifest
from checkpoint.format.records import Manifest
from checkpoint.plan.readable import check_files
from checkpoint.plan.state_plan import StatePlan
from checkpoint.plan.write_runs import Slots
from checkpoint.ranks.coordinator import Coordinator, together
from checkpoint.saving.data_files import (
    RankFiles,
    RankRecords,
    decode_records,
    encode_records,
    filling_supplies,
    merge_records,
)
from checkpoint.saving.generation import Generation
from checkpoint.saving.rank_plan import RankPlan
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.changes import Versions
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.snapshot import Snapshot, copy_errors
from checkpoint.transfer.writer import Supply


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything a save does, decided before it touches anything. `slots` are a filler's staging
    buffers."""

    destination: Destination
    state: StatePlan
    fillers: tuple[Filler, ...]
    slots: tuple[Slots, ...]
    saved: int
    """When, for the manifest: nanoseconds since 1970."""
    versions: Versions
    """Of the tensors of `state` when the save was called."""
    cancellation: Cancellation
    ranks: RankPlan | None = None
    """Of a save by several ranks; `state` is that of this one, `fillers` what it writes."""

    @property
    def path(self) -> Path:
        return self.destination.path


@dataclass(frozen=True, slots=True)
class Committed:
    """What became durable; every rank is told the `numbers`, rank 0 made the `manifest`."""

    numbers: dict[str, int]
    manifest: Manifest | None


def commit(
    plan: SavePlan,
    engine: Engine,
    coordinator: Coordinator,
    on_staged: Callable[[], None],
    snapshot: Snapshot | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Committed:
    """Writes the plan, together with the other ranks if there are any; returns when it is durable.

    Every rank calls `begin` first, and `on_staged` when no source of its own will be read again;
    both fail the save if they raise. With `snapshot` the sources are read there.

    Raises OSError (AioError where a transfer failed) naming the file, and leaves nothing behind. If
    the very last sync fails, the new checkpoint is in place and whole, the old one's data are still
    there, and a power cut may bring either back. Raises StoppedError if it is to stop before the
    manifest is written, and RankFailedError on ranks that others failed.
    """
    is_first = coordinator.rank == 0
    is_alone = coordinator.world_size == 1
    files = RankFiles(plan.destination, coordinator.rank, plan.fillers)
    draft = _Draft(plan)
    with Generation(plan.destination) as generation, ExitStack() as opened:

        def clear() -> None:
            begin()
            if is_first:
                generation.claim()

        def create() -> None:
            files.create(engine, opened)

        def write() -> Any:
            def staged() -> None:
                on_staged()
                if is_alone:  # the last writes are still in flight
                    with paused_collector():
                        draft.make([files.records()])

            made = generation.unsynced if is_first else plan.destination.data_directories
            with copy_errors(snapshot):
                supplies = supplies_of(plan, snapshot)
                write_files(files, engine, supplies, staged, plan.cancellation, made)
            plan.versions.check_ended()
            plan.cancellation.check()
            return None if is_alone else encode_records(_numbered(plan, files.records()))

        def publish() -> dict[str, int]:
            if not is_first:
                return {}
            if not is_alone:
                draft.make([decode_records(records) for records in every])
            check_files(draft.manifest, plan.path)
            plan.cancellation.check()
            generation.publish(draft.raw)
            return numbers_of(draft.manifest)

        # 0. The lock, with what killed saves left out of the way.
        together(coordinator, clear)
        # 1. Room, then directories.
        together(coordinator, files.check_space)
        together(coordinator, lambda: generation.make() if is_first else None)
        # 2. Files at their full size: a full disk shows here.
        together(coordinator, create)
        # 3. to 6. Write; check every completion; the data durable, and their names.
        # 7. Every rank has got here, or none goes on.
        every = together(coordinator, write)
        # 8. to 11. The manifest.
        numbers = together(coordinator, publish)
    return Committed(numbers[0], draft.manifest if is_first else None)


def supplies_of(plan: SavePlan, snapshot: Snapshot | None) -> Sequence[Supply]:
    """What feeds the writer of each data file."""
    return filling_supplies(plan.fillers, plan.slots) if snapshot is None else snapshot.supplies


def write_files(
    files: RankFiles,
    engine: Engine,
    supplies: Sequence[Supply],
    on_staged: Callable[[], None],
    cancellation: Cancellation,
    directories: Iterable[Path],
) -> None:
    """Stages 3. to 6. of one rank: its files written and durable, and their names, which are in
    these directories.
    """
    files.write(engine, supplies, on_staged, cancellation)
    files.sync()
    for directory in directories:
        sync_directory(directory)


def _numbered(plan: SavePlan, records: RankRecords) -> RankRecords:
    return records if plan.ranks is None else plan.ranks.by_tensor(records)


class _Draft:
    """The manifest on its way."""

    manifest: Manifest
    raw: bytes

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan

    def make(self, ranks: Sequence[RankRecords]) -> None:
        """All sources of all ranks have been read and summed."""
        with paused_collector():
            self.manifest = manifest_of(self._plan, ranks)
            self.raw = encode_manifest(self.manifest, self._plan.state.tree_text)


def manifest_of(plan: SavePlan, ranks: Sequence[RankRecords]) -> Manifest:
    """The manifest of what all ranks wrote."""
    files, chunks = merge_records(ranks)
    return Manifest(
        uuid=plan.destination.uuid,
        world_size=len(ranks),
        roots=tuple(str(stripe) for stripe in plan.destination.stripes),
        files=files,
        storages=plan.state.storages,
        tensors=tuple(
            tensor.record.with_chunks(chunks[index])
            for index, tensor in enumerate(plan.state.tensors)
        ),
        tree=plan.state.tree,
        saved=plan.saved,
    )


def numbers_of(manifest: Manifest) -> dict[str, int]:
    """The fields of a `SaveInfo` that count things."""
    return {
        "nbytes": manifest.nbytes,
        "file_nbytes": sum(file.nbytes for file in manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_files": len(manifest.files),
    }
