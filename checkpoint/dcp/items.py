"""What DCP gives one rank to write: tensors as parts of data files, values as nodes of the tree.

A value that a state tree holds is written as such, so that `checkpoint.load` gives it back; what
DCP's planner makes of any other stays the bytes that it is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from aio import Engine
from checkpoint.dcp.tree import BLOB_DTYPE, data_name
from checkpoint.directory.destination import Destination
from checkpoint.format.records import TensorRecord
from checkpoint.format.scalars import Node, encode_dtype
from checkpoint.format.tree import encode_tree
from checkpoint.plan.state_plan import plan_part_files
from checkpoint.plan.striping import Part
from checkpoint.plan.write_runs import plan_slots
from checkpoint.saving.commit import write_files
from checkpoint.saving.data_files import RankFiles, RankRecords, filling_supplies
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.changes import Versions
from checkpoint.tensors.sources import Source, array_source, tensor_source
from checkpoint.transfer.filling import Filler


class Entry(NamedTuple):
    """What a part belongs to: an entry of DCP's state dict, of this dtype and shape as a whole.

    `array` describes the numpy dtype of one that is no tensor.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    array: Node | None


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank reports: its records, the entry of each part in them, and plain values."""

    records: RankRecords
    entries: tuple[Entry, ...]
    values: dict[str, Node]


class Items:
    """What one rank writes. `sizes` are bytes, by item."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self.sizes: list[int] = []
        self._sources: list[Source] = []
        self._entries: list[Entry] = []
        self._records: list[TensorRecord] = []
        self._parts: list[Part] = []
        self._values: dict[str, Node] = {}
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                self._add_value(item, planner)
            else:
                self._add_tensor(item, planner.resolve_data(item))

    def _add_value(self, item: WriteItem, planner: SavePlanner) -> None:
        fqn = item.index.fqn
        value = _plain_value(item, planner)
        if type(value) is np.ndarray and _is_plain_array(value):
            self._add_array(fqn, value, encode_dtype(value.dtype))
            return
        try:
            self._values[fqn] = encode_tree(value, _is_never_data).node
        except (TypeError, ValueError):
            data: Any = planner.resolve_data(item)
            assert isinstance(data, io.BytesIO)
            self._add_array(fqn, np.frombuffer(data.getbuffer(), BLOB_DTYPE), BLOB_DTYPE)
        else:
            self.sizes.append(0)

    def _add_array(self, fqn: str, array: np.ndarray[Any, Any], dtype: Node) -> None:
        source = array_source(array)
        entry = Entry(fqn, source.element.name, source.shape, dtype)
        self._add(entry, (0,) * len(source.shape), source)

    def _add_tensor(self, item: WriteItem, tensor: Any) -> None:
        assert item.tensor_data is not None
        source = tensor_source(tensor.detach().as_subclass(torch.Tensor))
        size, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        if source.shape != tuple(chunk.sizes):
            raise ValueError(
                f"{item.index.fqn} is a tensor of shape {source.shape}, its plan says "
                f"{tuple(chunk.sizes)}"
            )
        entry = Entry(item.index.fqn, source.element.name, size, None)
        self._add(entry, tuple(chunk.offsets), source)

    def _add(self, entry: Entry, start: tuple[int, ...], source: Source) -> None:
        self.sizes.append(source.nbytes)
        self._entries.append(entry)
        self._records.append(TensorRecord(data_name(entry.fqn), entry.dtype, entry.shape, ()))
        self._parts.append(Part(source.element.itemsize, start, source.shape))
        self._sources.append(source)

    def write(
        self, destination: Destination, rank: int, staging_bytes: int, cancellation: Cancellation
    ) -> Written:
        """Writes them to files of this rank, durably; none if there are none: a rank without items
        tells DCP of nothing, so that its files would be in no manifest.

        Raises OSError naming the file, ChangedTensorError, and StoppedError when it is to stop.
        """
        if not self.sizes:
            return Written(RankRecords((), {}), (), {})
        records = zip(self._records, self._sources, strict=True)
        versions = Versions((record.name, source) for record, source in records)
        weights = [1.0] * destination.num_stripes
        plans = plan_part_files(
            self._records, self._parts, uuid=destination.uuid, rank=rank, weights=weights
        )
        fillers = [
            Filler(plan, [self._sources[shard.tensor] for shard in plan.shards]) for plan in plans
        ]
        share = staging_bytes // len(plans)
        slots = [plan_slots(plan.layout.nbytes, share) for plan in plans]
        files = RankFiles(destination, rank, fillers)
        files.check_space()
        with Engine(lanes=destination.num_stripes) as engine, ExitStack() as undo:
            files.create(engine, undo)
            supplies = filling_supplies(fillers, slots)
            directories = destination.data_directories
            write_files(files, engine, supplies, versions.check, cancellation, directories)
        return Written(files.records(), tuple(self._entries), self._values)


_UNKNOWN = object()


def _plain_value(item: WriteItem, planner: SavePlanner) -> Any:
    """The value that a planner would serialise as it is; _UNKNOWN of planners that might not."""
    if not isinstance(planner, DefaultSavePlanner):
        return _UNKNOWN
    kind = type(planner)
    for method in ("resolve_data", "transform_object"):
        if getattr(kind, method) is not getattr(DefaultSavePlanner, method):
            return _UNKNOWN
    return planner.lookup_object(item.index)


def _is_plain_array(array: np.ndarray[Any, Any]) -> bool:
    try:
        described = encode_dtype(array.dtype)
    except TypeError:
        return False
    return bool(described != BLOB_DTYPE)


def _is_never_data(_: object) -> bool:
    return False
