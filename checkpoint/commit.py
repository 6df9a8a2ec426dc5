"""Makes a planned checkpoint durable: the one place where the order of a save is decided.

Invariants: until the rename the old checkpoint is whole and the new one does not exist; after it
the reverse; nothing is deleted before the directory that holds the rename is durable. A failure
before the rename removes everything the save made. Follows DESIGN.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aio import Engine, File, Slab, sync_directory
from checkpoint.checksum import CRC_BLOCK_BYTES, crc32c
from checkpoint.collector import paused_collector
from checkpoint.coordinator import Coordinator
from checkpoint.early import EarlyStage
from checkpoint.filling import Filler
from checkpoint.leftovers import (
    clear_leftovers,
    create_generation,
    locked,
    prune,
    remove_generation,
    temporary_manifest,
    write_durably,
)
from checkpoint.locate import is_own_manifest
from checkpoint.manifest import MANIFEST_NAME, encode_manifest
from checkpoint.planning import FilePlan, StatePlan
from checkpoint.records import ChunkRecord, FileRecord, Manifest
from checkpoint.space import check_space
from checkpoint.staging import Slots
from checkpoint.writer import FileJob, FillingSupply, Supply, Writer


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything a save does, decided before it touches anything.

    `stripes` are the directories that take a data file each; none for the checkpoint's own.
    """

    path: Path
    uuid: str
    stripes: tuple[Path, ...]
    state: StatePlan
    fillers: tuple[Filler, ...]
    slots: tuple[Slots, ...]

    @property
    def files(self) -> list[FilePlan]:
        return [filler.plan for filler in self.fillers]

    @property
    def stripe_directories(self) -> list[Path]:
        """The directories this save makes outside of the checkpoint's own."""
        return [stripe / f"{self.path.name}.{self.uuid}" for stripe in self.stripes]

    def relative_path(self, file: FilePlan, rank: int) -> str:
        """Where a data file is, from its stripe or from the checkpoint."""
        folder = f"{self.path.name}.{self.uuid}" if self.stripes else self.uuid
        return f"{folder}/r{rank}-{file.stripe}.safetensors"

    def root(self, file: FilePlan) -> Path:
        return self.stripes[file.stripe] if self.stripes else self.path


@dataclass(frozen=True, slots=True)
class RankRecords:
    """What one rank wrote: data files, and by tensor name the chunks in them.

    `ChunkRecord.file` counts in `files`.
    """

    files: tuple[FileRecord, ...]
    chunks: dict[int, tuple[ChunkRecord, ...]]


def commit(
    plan: SavePlan,
    engine: Engine,
    coordinator: Coordinator,
    on_staged: Callable[[], None] | None = None,
    early: EarlyStage | None = None,
) -> Manifest:
    """Writes the plan and returns when it is durable.

    `on_staged` is called when no source will be read again; with `early` the sources are read
    there.

    Raises OSError (AioError where a transfer failed) naming the file, and leaves nothing behind. If
    the very last sync fails, the new checkpoint is in place and whole, the old one's data are still
    there, and a power cut may bring either back.
    """
    with _directory(plan.path), locked(plan.path), ExitStack() as undo:
        _check_replaceable(plan.path / MANIFEST_NAME)
        # 0. Room, with what killed saves left out of the way.
        clear_leftovers(plan.path)
        check_space([(plan.root(file), file.layout.nbytes) for file in plan.files])
        # 1. Directories.
        undo.callback(remove_generation, plan.path, plan.uuid)
        directories = create_generation(plan.path, plan.uuid, plan.stripe_directories)
        # 2. Files at their full size: a full disk shows here.
        files = _create_files(plan, engine, coordinator.rank, undo)
        # 3. and 4. Write; check every completion.
        draft = _Draft(plan, coordinator, on_staged)
        supplies = _filling(plan) if early is None else early.supplies
        Writer(engine, _jobs(plan, engine, files, supplies), draft.prepare).run()
        # 5. The data durable.
        for file in files:
            file.sync()
            file.close()
        # 6. Its names durable.
        for directory in directories:
            sync_directory(directory)
        # 7. Every rank has got here, or none goes on.
        draft.agree()
        # 8. The manifest, durable, under a name that nobody reads.
        temporary = temporary_manifest(plan.path, plan.uuid)
        write_durably(temporary, draft.raw)
        # 9. The switch.
        temporary.replace(plan.path / MANIFEST_NAME)
        undo.pop_all()
        # 10. The switch durable.
        sync_directory(plan.path)
        # 11. Only now what it replaced.
        prune(plan.path, keep=plan.uuid)
    return draft.manifest


class _Draft:
    """The manifest on its way: what this rank wrote, then what all of them wrote.

    One process knows everything when the last byte has been summed, and encodes its manifest while
    the last writes are still in flight.
    """

    manifest: Manifest
    raw: bytes

    def __init__(
        self, plan: SavePlan, coordinator: Coordinator, on_staged: Callable[[], None] | None
    ) -> None:
        self._plan = plan
        self._coordinator = coordinator
        self._on_staged = on_staged
        self._records: RankRecords | None = None

    def prepare(self) -> None:
        """All sources have been read and summed."""
        if self._on_staged is not None:
            self._on_staged()
        with paused_collector():
            self._records = _records(self._plan, self._coordinator.rank)
            if self._coordinator.world_size == 1:
                self._encode([self._records])

    def agree(self) -> None:
        """Every rank has written all it had; raises on every rank if one of them failed."""
        assert self._records is not None
        ranks = self._coordinator.exchange(self._records)
        if self._coordinator.world_size > 1:
            self._encode(ranks)

    def _encode(self, ranks: Sequence[RankRecords]) -> None:
        self.manifest = _merge(self._plan, ranks)
        self.raw = encode_manifest(self.manifest, self._plan.state.tree_text)


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Makes the checkpoint's directory, durably; removes it again if the save fails."""
    missing = [parent for parent in [path, *path.parents] if not parent.exists()]
    try:
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)
        yield
    except BaseException:
        for directory in missing:
            try:
                directory.rmdir()
            except OSError:  # somebody else's by now, or never made
                break
        raise


def _check_replaceable(manifest: Path) -> None:
    """A file of this name that no save wrote is not ours to replace."""
    if manifest.exists() and not is_own_manifest(manifest):
        raise FileExistsError(
            17,
            "there is a file of this name that is not the manifest of a checkpoint",
            str(manifest),
        )


def _create_files(plan: SavePlan, engine: Engine, rank: int, undo: ExitStack) -> list[File]:
    files = []
    for file_plan in plan.files:
        path = plan.root(file_plan) / plan.relative_path(file_plan, rank)
        file = engine.open(path, "x", size=file_plan.layout.nbytes)
        undo.callback(file.close)
        files.append(file)
    return files


def _filling(plan: SavePlan) -> list[FillingSupply]:
    """Supplies that fill as they write."""
    with Slab(sum(slots.count * slots.nbytes for slots in plan.slots)) as slab:
        return [
            FillingSupply(filler, slots, slab)
            for filler, slots in zip(plan.fillers, plan.slots, strict=True)
        ]


def _jobs(
    plan: SavePlan, engine: Engine, files: Sequence[File], supplies: Sequence[Supply]
) -> list[FileJob]:
    return [
        FileJob(supply, file, supply.filler.plan.stripe % engine.lanes)
        for supply, file in zip(supplies, files, strict=True)
    ]


def _records(plan: SavePlan, rank: int) -> RankRecords:
    files = []
    chunks: dict[int, tuple[ChunkRecord, ...]] = {}
    for number, filler in enumerate(plan.fillers):
        file = filler.plan
        layout = file.layout
        header = layout.header
        root = file.stripe if plan.stripes else None
        path = plan.relative_path(file, rank)
        files.append(FileRecord(root, path, layout.nbytes, len(header), crc32c(header)))
        for shard, offset, crcs in zip(file.shards, layout.offsets, filler.sums, strict=True):
            assert len(crcs) == -(-shard.nbytes // CRC_BLOCK_BYTES), "a shard was not written whole"
            chunk = ChunkRecord(number, offset, shard.nbytes, shard.start, shard.shape, tuple(crcs))
            chunks[shard.tensor] = (*chunks.get(shard.tensor, ()), chunk)
    return RankRecords(tuple(files), chunks)


def _merge(plan: SavePlan, ranks: Sequence[RankRecords]) -> Manifest:
    """One manifest of all ranks' records; every rank's files are numbered after the ones before."""
    files: list[FileRecord] = []
    chunks: dict[int, list[ChunkRecord]] = {}
    for records in ranks:
        before = len(files)
        for tensor, own in records.chunks.items():
            moved = [chunk._replace(file=chunk.file + before) for chunk in own]
            chunks.setdefault(tensor, []).extend(moved)
        files.extend(records.files)
    tensors = [
        tensor.record.with_chunks(chunks[index]) for index, tensor in enumerate(plan.state.tensors)
    ]
    return Manifest(
        uuid=plan.uuid,
        world_size=len(ranks),
        roots=tuple(str(stripe) for stripe in plan.stripes),
        files=tuple(files),
        storages=plan.state.storages,
        tensors=tuple(tensors),
        tree=plan.state.tree,
    )
