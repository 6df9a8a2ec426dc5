"""Entries that come in parts, by names, from a library that has planned a save itself: what one
rank writes of them, and the manifest of what all ranks wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

from aio import Engine
from checkpoint.directory.destination import Destination
from checkpoint.format.names import data_name
from checkpoint.format.records import ChunkRecord, FileRecord, Manifest, TensorRecord
from checkpoint.format.scalars import Node
from checkpoint.plan.state_plan import plan_part_files
from checkpoint.plan.striping import Part
from checkpoint.saving.commit import write_files
from checkpoint.saving.data_files import RankFiles, RankRecords, filling_supplies
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.changes import Versions
from checkpoint.tensors.copiers import Copier, begin_reading
from checkpoint.tensors.sources import Source
from checkpoint.transfer.filling import Filler


class Entry(NamedTuple):
    """What a part belongs to: a tensor of this dtype and shape as a whole.

    `array` describes the numpy dtype of one that is no tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Node | None


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank reports: its records, the entry of each part in them, and plain values."""

    records: RankRecords
    entries: tuple[Entry, ...]
    values: dict[str, Node]


class Entries:
    """What one rank writes."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._entries: list[Entry] = []
        self._records: list[TensorRecord] = []
        self._parts: list[Part] = []
        self._values: dict[str, Node] = {}

    def add_value(self, name: str, node: Node) -> None:
        """A value that goes to the tree, as the node that it is there."""
        self._values[name] = node

    def add(self, entry: Entry, start: tuple[int, ...], source: Source) -> None:
        """The part of an entry that begins at `start` and has the shape of `source`."""
        self._entries.append(entry)
        self._records.append(TensorRecord(data_name(entry.name), entry.dtype, entry.shape, ()))
        self._parts.append(Part(source.element.itemsize, start, source.shape))
        self._sources.append(source)

    def begin_reading(self, copier: Copier) -> None:
        """Orders all reads behind what the caller has computed so far."""
        begin_reading(copier, self._sources)

    def write(
        self,
        destination: Destination,
        rank: int,
        staging_bytes: int,
        state_nbytes: int,
        copier: Copier,
        cancellation: Cancellation,
    ) -> Written:
        """Writes them to files of this rank, durably; none if there is nothing. `state_nbytes` are
        those of all tensors, of all ranks; `copier` brings what is on devices, and is closed.

        Raises OSError naming the file, ChangedTensorError, and StoppedError when it is to stop.
        """
        if not self._parts and not self._values:
            return Written(RankRecords((), {}), (), {})
        records = zip(self._records, self._sources, strict=True)
        versions = Versions((record.name, source) for record, source in records)
        weights = [1.0] * destination.num_stripes
        plans = plan_part_files(
            self._records,
            self._parts,
            uuid=destination.uuid,
            rank=rank,
            weights=weights,
            state_nbytes=state_nbytes,
        )
        fillers = [
            Filler(plan, [self._sources[shard.tensor] for shard in plan.shards], copier)
            for plan in plans
        ]
        share = staging_bytes // len(plans)
        slots = [filler.slots(share) for filler in fillers]
        files = RankFiles(destination, rank, fillers)
        files.check_space()
        with ExitStack() as undo, closing(copier):
            engine = undo.enter_context(Engine(lanes=destination.num_stripes))
            files.create(engine, undo)
            supplies = filling_supplies(fillers, slots)
            directories = destination.data_directories
            write_files(files, engine, supplies, versions.check, cancellation, directories)
        return Written(files.records(), tuple(self._entries), self._values)


def manifest_of(
    destination: Destination,
    written: Sequence[Written],
    names: Iterable[str],
    tree_of: Callable[[Mapping[str, Node]], Node],
    *,
    world_size: int,
    saved: int,
) -> Manifest:
    """The manifest of what all ranks wrote of entries with these `names`; `tree_of` makes the tree
    of their nodes by name. `saved`: when, see `time_of_save`.

    Raises ValueError naming an entry that no rank wrote, or several with other dtypes or shapes.
    """
    files, chunks, entries = _by_name(written)
    values: dict[str, Node] = {}
    for rank in written:
        values.update(rank.values)
    leaves: dict[str, Node] = {}
    tensors: list[TensorRecord] = []
    for name in names:
        if name in values:
            leaves[name] = values[name]
            continue
        entry = _only_entry(name, entries.get(name, []))
        leaves[name] = _node(len(tensors), entry.array)
        record = TensorRecord(
            data_name(name), entry.dtype, entry.shape, tuple(chunks.get(name, ()))
        )
        tensors.append(record)
    return Manifest(
        uuid=destination.uuid,
        world_size=world_size,
        roots=tuple(str(stripe) for stripe in destination.stripes),
        files=files,
        storages=(),
        tensors=tuple(tensors),
        tree=tree_of(leaves),
        saved=saved,
    )


def _node(index: int, array: Node | None) -> Node:
    """The node of stored tensor `index`: a tensor, or an array of that dtype."""
    return {"tensor": index} if array is None else {"array": index, "dtype": array}


def _only_entry(name: str, entries: list[Entry]) -> Entry:
    if not entries:
        raise ValueError(f"cannot save {name}: no rank wrote it")
    if len(entries) > 1:
        kinds = ", ".join(sorted(f"{entry.dtype} of shape {entry.shape}" for entry in entries))
        raise ValueError(f"cannot save {name}: it is not the same on all ranks, but {kinds}")
    return entries[0]


def _by_name(
    written: Sequence[Written],
) -> tuple[tuple[FileRecord, ...], dict[str, list[ChunkRecord]], dict[str, list[Entry]]]:
    """All files, and the chunks and the kinds of every entry."""
    files: list[FileRecord] = []
    chunks: dict[str, list[ChunkRecord]] = {}
    entries: dict[str, list[Entry]] = {}
    for rank in written:
        for part, own in rank.records.chunks.items():
            entry = rank.entries[part]
            moved = [chunk._replace(file=chunk.file + len(files)) for chunk in own]
            chunks.setdefault(entry.name, []).extend(moved)
        for entry in rank.entries:
            known = entries.setdefault(entry.name, [])
            if entry not in known:
                known.append(entry)
        files.extend(rank.records.files)
    return tuple(files), chunks, entries
