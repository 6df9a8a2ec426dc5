"""Makes a planned checkpoint durable: the one place where the order of a save is decided.

Invariants: until the rename the old checkpoint is whole and the new one does not exist; after it
the reverse; nothing is deleted before the directory that holds the rename is durable. A failure
before the rename removes everything the save made; whether the rename happened is asked of the
directory itself. Follows DESIGN.md, section 6.

A commit runs where no signal handler does, see `checkpoint.sheltered`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aio import Engine, read_regular_file, sync_directory
from checkpoint.collector import paused_collector
from checkpoint.directory.destination import Destination
from checkpoint.directory.generations import (
    clear_leftovers,
    create_generation,
    discard_generation,
    prune,
    temporary_manifest,
    write_durably,
)
from checkpoint.directory.locate import is_own_manifest
from checkpoint.directory.lock import locked
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME, encode_manifest
from checkpoint.format.records import Manifest
from checkpoint.plan.readable import check_files
from checkpoint.plan.state_plan import StatePlan
from checkpoint.plan.write_runs import Slots
from checkpoint.saving.data_files import RankFiles, RankRecords, filling_supplies, merge_records
from checkpoint.saving.rank_plan import RankPlan
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.changes import Versions
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.snapshot import EarlyStage, copy_errors
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


def commit(
    plan: SavePlan,
    engine: Engine,
    on_staged: Callable[[], None] | None = None,
    early: EarlyStage | None = None,
) -> Manifest:
    """Writes the plan of one process and returns when it is durable.

    `on_staged` is called when no source will be read again, and fails the save if it raises; with
    `early` the sources are read there.

    Raises OSError (AioError where a transfer failed) naming the file, and leaves nothing behind. If
    the very last sync fails, the new checkpoint is in place and whole, the old one's data are still
    there, and a power cut may bring either back. Raises StoppedError if it is to stop before the
    manifest is written.
    """
    destination, path = plan.destination, plan.path
    files = RankFiles(destination, 0, plan.fillers)
    draft = _Draft(plan, files, on_staged)
    with new_directory(path), locked(path, make=True), ExitStack() as undo:
        check_replaceable(path)
        # 0. Room, with what killed saves left out of the way.
        clear_leftovers(path, destination.stripes)
        files.check_space()
        # 1. Directories.
        undo.callback(discard_generation, path, destination.uuid)
        directories = create_generation(path, destination.uuid, destination.stripe_directories)
        # 2. Files at their full size: a full disk shows here.
        files.create(engine, undo)
        # 3. and 4. Write; check every completion.
        with copy_errors(early):
            files.write(engine, supplies_of(plan, early), draft.prepare, plan.cancellation)
        # 5. The data durable.
        files.sync()
        # 6. Their names durable.
        for directory in directories:
            sync_directory(directory)
        check_files(draft.manifest, path)
        plan.cancellation.check()
        # 7. is for several ranks. 8. to 11. The manifest.
        publish(destination, draft.raw, undo)
    return draft.manifest


def supplies_of(plan: SavePlan, early: EarlyStage | None) -> Sequence[Supply]:
    """What feeds the writer of each data file."""
    return filling_supplies(plan.fillers, plan.slots) if early is None else early.supplies


def publish(destination: Destination, raw: bytes, undo: ExitStack) -> None:
    """The end of a commit: makes the manifest count. From the rename on nothing is undone.

    Raises OSError, and CorruptCheckpointError if the manifest that is read back is another one;
    what it replaced is there still.
    """
    path, uuid = destination.path, destination.uuid
    # 8. The manifest, durable, under a name that nobody reads.
    temporary = temporary_manifest(path, uuid)
    write_durably(temporary, raw)
    # 9. The switch.
    temporary.replace(path / MANIFEST_NAME)
    undo.pop_all()
    # 10. The switch durable.
    sync_directory(path)
    if read_regular_file(path / MANIFEST_NAME) != raw:
        raise CorruptCheckpointError("reads back as other bytes", path=path / MANIFEST_NAME)
    # 11. Only now what it replaced.
    prune(path, uuid, destination.stripes)


class _Draft:
    """The manifest on its way.

    One process knows everything when the last byte has been summed, and encodes its manifest while
    the last writes are still in flight.
    """

    manifest: Manifest
    raw: bytes

    def __init__(
        self,
        plan: SavePlan,
        files: RankFiles,
        on_staged: Callable[[], None] | None,
    ) -> None:
        self._plan = plan
        self._files = files
        self._on_staged = on_staged

    def prepare(self) -> None:
        """All sources have been read and summed."""
        if self._on_staged is not None:
            self._on_staged()
        with paused_collector():
            self.manifest = manifest_of(self._plan, [self._files.records()])
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


@contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """Makes the checkpoint's directory, durably; removes it again if the save fails."""
    missing = missing_directories(path)
    try:
        make_directory(path)
        yield
    except BaseException:
        for directory in missing:
            try:
                directory.rmdir()
            except OSError:  # somebody else's by now, or never made
                break
        raise


def missing_directories(path: Path) -> list[Path]:
    """What would have to be made for a directory to exist, itself first."""
    return [parent for parent in [path, *path.parents] if not parent.exists()]


def make_directory(path: Path) -> None:
    """Makes a directory and those above it, durably."""
    for directory in reversed(missing_directories(path)):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def check_replaceable(checkpoint: Path) -> None:
    """Raises FileExistsError for a manifest.json that no save wrote: it is not ours to replace."""
    manifest = checkpoint / MANIFEST_NAME
    if manifest.exists() and not is_own_manifest(manifest):
        raise FileExistsError(
            errno.EEXIST,
            "there is a file of this name that is not the manifest of a checkpoint",
            str(manifest),
        )
