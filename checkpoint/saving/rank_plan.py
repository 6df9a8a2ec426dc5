"""From the state trees of several ranks to what each of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint.format.records import ChunkRecord, TensorRecord
from checkpoint.format.slices import flat_first, range_boxes
from checkpoint.known.damage import damage_to_tell
from checkpoint.plan.ownership import OwnedRanges, Piece, share_out
from checkpoint.plan.state_plan import FilePlan, StatePlan, plan_part_files
from checkpoint.plan.striping import Part
from checkpoint.saving.data_files import RankRecords
from checkpoint.tensors.sources import Source, part_of


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What this rank writes: its data files with the source of each shard. `tensors` are, by part,
    the number of the tensor on rank 0; `stripes` those of all ranks, of which this one has `own`.
    """

    files: tuple[FilePlan, ...]
    sources: tuple[Source, ...]
    tensors: tuple[int, ...]
    stripes: tuple[Path, ...]
    own: tuple[int, ...]

    def sources_of(self, file: FilePlan) -> list[Source]:
        """Where the shards of a file come from, one source per shard."""
        return [self.sources[shard.tensor] for shard in file.shards]

    def by_tensor(self, records: RankRecords) -> RankRecords:
        """Records by part as records by tensor of rank 0."""
        chunks: dict[int, tuple[ChunkRecord, ...]] = {}
        for part, written in records.chunks.items():
            number = self.tensors[part]
            chunks[number] = (*chunks.get(number, ()), *written)
        return replace(records, chunks=chunks)


def account_of(
    state: StatePlan, target: Path, stripes: Sequence[Path], uuid: str | None
) -> dict[str, Any]:
    """What a rank tells the others before a save, as JSON: what it has and where it goes, and of
    which saves it knows damage. `uuid` is that of the save, from rank 0.
    """
    return {
        "name": target.name,
        "uuid": uuid,
        "damaged": damage_to_tell(),
        "stripes": [str(stripe) for stripe in stripes],
        "tensors": [
            list(_owned_ranges(tensor.record.name, tensor.source)) for tensor in state.tensors
        ],
    }


def plan_rank(
    state: StatePlan, every: Sequence[dict[str, Any]], rank: int, stripes: Sequence[Path]
) -> RankPlan:
    """Which part of the save is this rank's, from the accounts of all. Raises ValueError on every
    rank where they save to different places, or to stripes only in part, and as `share_out` does.
    """
    _check_same_place(every)
    uuid = every[0]["uuid"]
    ranks = [[_decoded(entry) for entry in theirs["tensors"]] for theirs in every]
    pieces = share_out(ranks)[rank]
    named = {tensor.record.name: tensor for tensor in state.tensors}
    records: list[TensorRecord] = []
    parts: list[Part] = []
    sources: list[Source] = []
    tensors: list[int] = []
    for piece in pieces:
        tensor = named[ranks[0][piece.tensor].name]
        for part in _boxes(tensor.record, piece):
            records.append(tensor.record)
            parts.append(part)
            sources.append(_source_of_box(tensor.record, tensor.source, part))
            tensors.append(piece.tensor)
    weights = [1.0] * max(len(stripes), 1)
    nbytes = sum(owned.numel * owned.itemsize for owned in ranks[0])
    files = plan_part_files(
        records, parts, uuid=uuid, rank=rank, weights=weights, state_nbytes=nbytes
    )
    union = list(dict.fromkeys(stripe for theirs in every for stripe in theirs["stripes"]))
    return RankPlan(
        files=tuple(files),
        sources=tuple(sources),
        tensors=tuple(tensors),
        stripes=tuple(Path(stripe) for stripe in union),
        own=tuple(union.index(str(stripe)) for stripe in stripes),
    )


def _check_same_place(every: Sequence[dict[str, Any]]) -> None:
    first = every[0]
    for rank, theirs in enumerate(every):
        if theirs["name"] != first["name"]:
            raise ValueError(
                f"rank 0 saves to {first['name']}, rank {rank} to {theirs['name']}; every rank has "
                "to give the same path"
            )
        if bool(theirs["stripes"]) != bool(first["stripes"]):
            with_them, without = (0, rank) if first["stripes"] else (rank, 0)
            raise ValueError(
                f"rank {with_them} is given stripe_dirs, rank {without} none; give every rank "
                "those that it is to write to, or none of them any"
            )


def check_whole(state: StatePlan) -> None:
    """Raises ValueError for a tensor that one process does not have all of."""
    for tensor in state.tensors:
        check_held(tensor.record.name, tensor.source)


def check_held(name: str, source: Source) -> None:
    """Raises ValueError for a source that does not have all of its bytes."""
    if source.ranges is not None:
        share_out([[_owned_ranges(name, source)]])


def _owned_ranges(name: str, source: Source) -> OwnedRanges:
    return OwnedRanges(name, source.element.name, source.shape, source.ranges)


def _decoded(entry: Sequence[Any]) -> OwnedRanges:
    name, dtype, shape, ranges = entry
    held = None if ranges is None else tuple((first, length) for first, length in ranges)
    return OwnedRanges(name, dtype, tuple(shape), held)


def _boxes(record: TensorRecord, piece: Piece) -> list[Part]:
    """The fewest row-major boxes that are the elements of a piece."""
    itemsize = record.element.itemsize
    if not piece.length:
        return [Part(itemsize, (0,) * len(record.shape), record.shape)]
    boxes = range_boxes(record.shape, piece.first, piece.first + piece.length)
    return [
        Part(itemsize, tuple(place.start for place in slices), shape) for slices, shape in boxes
    ]


def _source_of_box(record: TensorRecord, source: Source, part: Part) -> Source:
    first = flat_first(record.shape, part.start, part.shape)
    assert first is not None
    return part_of(source, first * part.itemsize, part.shape)
