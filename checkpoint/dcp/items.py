"""What DCP gives one rank to write: tensors as parts of data files, values as nodes of the tree.

A value that a state tree holds is written as such, so that `checkpoint.load` gives it back; what
DCP's planner makes of any other stays the bytes that it is.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from checkpoint.dcp.tree import BLOB_DTYPE
from checkpoint.directory.destination import Destination
from checkpoint.format.scalars import Node, encode_dtype
from checkpoint.format.tree import encode_tree
from checkpoint.saving.entries import Entries, Entry, Written
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.copiers import Copier
from checkpoint.tensors.sources import Source, array_source, tensor_source


class Items:
    """What one rank writes. `sizes` are bytes, by item."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self.sizes: list[int] = []
        self._entries = Entries()
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                self._add_value(item, planner)
            else:
                self._add_tensor(item, planner)

    def _add_value(self, item: WriteItem, planner: SavePlanner) -> None:
        fqn = item.index.fqn
        value = _plain_value(item, planner)
        if type(value) is np.ndarray and _is_plain_array(value):
            self._add_array(fqn, value, encode_dtype(value.dtype))
            return
        try:
            node = encode_tree(value, _is_never_data).node
        except (TypeError, ValueError):
            data: Any = planner.resolve_data(item)
            assert isinstance(data, io.BytesIO)
            self._add_array(fqn, np.frombuffer(data.getbuffer(), BLOB_DTYPE), BLOB_DTYPE)
        else:
            self._entries.add_value(fqn, node)
            self.sizes.append(0)

    def _add_array(self, fqn: str, array: np.ndarray[Any, Any], dtype: Node) -> None:
        source = array_source(array)
        entry = Entry(fqn, source.element.name, source.shape, dtype)
        self._add(entry, (0,) * len(source.shape), source)

    def _add_tensor(self, item: WriteItem, planner: SavePlanner) -> None:
        assert item.tensor_data is not None
        tensor: Any = planner.resolve_data(item)
        source = tensor_source(tensor.detach().as_subclass(torch.Tensor))
        source = source._replace(aliases=tuple(distributed(planner, item.index.fqn)))
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
        self._entries.add(entry, start, source)

    def begin_reading(self, copier: Copier) -> None:
        """As of `Entries`."""
        self._entries.begin_reading(copier)

    def write(
        self,
        destination: Destination,
        rank: int,
        staging_bytes: int,
        state_nbytes: int,
        copier: Copier,
        cancellation: Cancellation,
    ) -> Written:
        """Writes them, see `Entries`. A rank without items tells DCP of nothing, so that its files
        would be in no manifest: it writes none.
        """
        return self._entries.write(
            destination, rank, staging_bytes, state_nbytes, copier, cancellation
        )


def distributed(planner: SavePlanner | LoadPlanner, fqn: str) -> Iterator[DTensor]:
    """The DTensor that a planner of torch has for an entry, if it is one: changes are counted on
    it, not on the part that the planner gives of it.
    """
    if isinstance(planner, DefaultSavePlanner | DefaultLoadPlanner):
        value = planner.state_dict.get(fqn)
        if isinstance(value, DTensor):
            yield value


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
