"""`verify`: reads every byte of a checkpoint and says what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aio import Engine
from aio.errors import without_frames
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.locate import with_current_manifest
from checkpoint.directory.relocation import StripeDirs, relocation
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import crc32c, join_crcs
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.names import PAD_PREFIX
from checkpoint.format.records import ChunkRecord, Manifest
from checkpoint.format.tree import decode_tree
from checkpoint.known.damage import damage_noted, note_damaged
from checkpoint.loading.reading import PlacedRead, read_files
from checkpoint.plan.write_runs import STAGING_BYTES, check_staging_bytes
from checkpoint.sheltered import Cancellation, sheltered
from checkpoint.tensors.assembly import view_of
from checkpoint.transfer.memory import check_engine
from checkpoint.transfer.reader import ChunkRead, ReadOptions


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `problems` names file, tensor and extent of each; none if all is well.

    `uuid`, `num_tensors` and `nbytes` (of all tensors) are empty if the manifest is damaged.
    """

    path: Path
    uuid: str
    num_tensors: int
    nbytes: int
    problems: tuple[CorruptCheckpointError, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: {self.num_tensors} tensors, {self.nbytes} bytes, all as saved"
        lines = [f"{self.path}: {len(self.problems)} problems"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def verify(
    path: PathLike,
    *,
    stripe_dirs: StripeDirs | None = None,
    engine: Engine | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> VerifyReport:
    """Reads the manifest, every header, every tensor and every gap, and reports all damage, also
    checksums in the manifest that contradict each other.

    Where another save takes the checkpoint's place meanwhile, the new one is verified instead.
    `stripe_dirs` is as in `load`.

    Raises FileNotFoundError for a missing path, IncompleteCheckpointError for one without manifest,
    OSError for what cannot be read at all, at the first such place: a disk that fails may give
    other bytes the next time.
    """
    checkpoint = checkpoint_path(path)
    check_staging_bytes(staging_bytes)
    check_engine(engine)
    moved = relocation(stripe_dirs)
    reports: list[VerifyReport] = []
    handled = sys.exception()

    def work(cancellation: Cancellation) -> VerifyReport:
        options = ReadOptions(
            engine=engine, staging_bytes=staging_bytes, verify=True, cancellation=cancellation
        )

        def attempt(manifest: Manifest) -> VerifyReport:
            reports[:] = [_verified(manifest, checkpoint, options)]
            for problem in reports[0].problems:
                raise problem  # only damage if the same manifest is there still
            read.is_all = True
            return reports[0]

        with damage_noted(checkpoint) as read:
            try:
                return with_current_manifest(checkpoint, read.by(attempt), moved)
            except CorruptCheckpointError:
                if reports and read.manifest is not None:
                    files = {one.path for one in reports[0].problems}
                    note_damaged(checkpoint, read.manifest, files)
                raise

    try:
        return sheltered(work, "checkpoint-verify")
    except CorruptCheckpointError as error:
        report = reports[0] if reports else VerifyReport(checkpoint, "", 0, 0, (error,))
        for problem in {error, *report.problems}:  # a report may be kept for long
            without_frames(problem, handled)
        return report


def _verified(manifest: Manifest, checkpoint: Path, options: ReadOptions) -> VerifyReport:
    problems: list[CorruptCheckpointError] = []
    try:
        decode_tree(manifest.tree, lambda where, node: view_of(manifest, where, node))
    except CorruptCheckpointError as error:
        problems.append(error.in_file(checkpoint / MANIFEST_NAME))
    problems.extend(_wrong_grains(manifest, checkpoint / MANIFEST_NAME))
    read_files(manifest, checkpoint, _everything(manifest), options, problems)
    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    return VerifyReport(checkpoint, manifest.uuid, len(manifest.tensors), nbytes, tuple(problems))


def _wrong_grains(manifest: Manifest, path: Path) -> Iterator[CorruptCheckpointError]:
    """Blocks of which the manifest has other checksums than its grains make together. Those that
    agree are of the same bytes, which are compared with those of the block alone.
    """
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            unit = chunk.grain_nbytes
            for number, crc in enumerate(chunk.crc32c if unit else ()):
                first, nbytes = chunk.block(number)
                sums = chunk.unit_sums(unit, first // unit, -(-(first + nbytes) // unit))
                joined = join_crcs(sums, unit, (nbytes - 1) % unit + 1)
                if joined != crc:
                    yield CorruptCheckpointError(
                        f"the grains in the {nbytes} bytes from {first} on of a chunk of "
                        f"{chunk.nbytes} make the checksum {joined:08x}, the block has {crc:08x}",
                        path=path,
                        tensor=tensor.name,
                    )


def _everything(manifest: Manifest) -> dict[int, list[PlacedRead]]:
    """All chunks and all gaps of every data file, none of it to be kept."""
    by_file: dict[int, list[ChunkRead]] = {number: [] for number in range(len(manifest.files))}
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            if chunk.nbytes:
                by_file[chunk.file].append(ChunkRead(tensor.name, chunk, 0, chunk.nbytes))
    for number, reads in by_file.items():
        reads.extend(_gaps(manifest, number, reads))
    return {number: [(read, None) for read in reads] for number, reads in by_file.items()}


def _gaps(manifest: Manifest, number: int, reads: list[ChunkRead]) -> Iterator[ChunkRead]:
    """What lies between the tensors of a file: zeros."""
    file = manifest.files[number]
    reached = file.header_nbytes
    edges = sorted((read.chunk.offset, read.chunk.nbytes) for read in reads)
    for offset, nbytes in [*edges, (file.nbytes, 0)]:
        gap = offset - reached
        if gap:
            crcs = (crc32c(bytes(gap)),)
            chunk = ChunkRecord(number, reached, gap, (0,), (gap,), crcs)
            yield ChunkRead(PAD_PREFIX, chunk, 0, gap)
        reached = offset + nbytes
