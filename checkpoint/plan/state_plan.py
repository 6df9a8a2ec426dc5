"""From a state tree to everything that a save has to write, decided before anything is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from checkpoint.format import elements
from checkpoint.format.checksum import GRAIN_SIZES, grain_bytes
from checkpoint.format.datafile import DataFileLayout, Entry, plan_data_file
from checkpoint.format.manifest import encode_node
from checkpoint.format.names import render
from checkpoint.format.records import TensorRecord
from checkpoint.format.scalars import encode_dtype
from checkpoint.format.slices import contiguous_strides, is_dense
from checkpoint.format.tree import Leaf, encode_tree
from checkpoint.plan.aliasing import Region, Stored, View, plan_aliasing
from checkpoint.plan.readable import check_tree
from checkpoint.plan.striping import Part, Shard, plan_stripes
from checkpoint.tensors.changes import Versions
from checkpoint.tensors.held import HeldStorage
from checkpoint.tensors.sources import Source, is_data_leaf, local_tensor, source_of


class TensorPlan(NamedTuple):
    """A tensor to store: its record, still without chunks, and where its bytes come from."""

    record: TensorRecord
    source: Source


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A state tree taken apart: tensors to store, storages that several share, the tree's JSON."""

    tensors: tuple[TensorPlan, ...]
    storages: tuple[int, ...]
    tree_text: str
    tree: Any

    def versions(self) -> Versions:
        """How often each tensor has been changed by now."""
        return Versions((tensor.record.name, tensor.source) for tensor in self.tensors)

    def sources_of(self, file: FilePlan) -> list[Source]:
        """Where the shards of a file come from, one source per shard."""
        return [self.tensors[shard.tensor].source for shard in file.shards]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file, of this number among its rank's: the shards in it, where each begins.

    `names` are those of the shards' tensors, `grains` the bytes of the grains of each shard, 0 for
    none; without, no shard has any.
    """

    number: int
    shards: tuple[Shard, ...]
    layout: DataFileLayout
    names: tuple[str, ...]
    grains: tuple[int, ...] = ()


def plan_state(state: object) -> StatePlan:
    """Takes a state tree apart.

    Raises TypeError naming the path of a leaf that cannot be saved, ValueError for a tree that
    holds itself, is too deep, or would not load for another reason.
    """
    encoded = encode_tree(state, is_data_leaf)
    leaves = encoded.leaves
    sources = [source_of_leaf(leaf) for leaf in leaves]
    aliasing = plan_aliasing(_regions(leaves, sources))
    tensors: list[TensorPlan] = []
    number: dict[int, int] = {}
    views: list[tuple[Leaf, View, Source]] = []
    for index, (leaf, source, place) in enumerate(
        zip(leaves, sources, aliasing.places, strict=True)
    ):
        if isinstance(place, View):
            views.append((leaf, place, source))
            continue
        number[index] = len(tensors)
        _fill_node(leaf, len(tensors))
        tensors.append(TensorPlan(_record(leaf, source, place), source))
    aliases: dict[int, list[torch.Tensor]] = {}
    for leaf, view, source in views:
        base = number[view.base]
        _fill_view(leaf, view, base, tensors[base].record)
        aliases.setdefault(base, []).extend((leaf.value, *source.aliases))
    for base, own in aliases.items():
        source = tensors[base].source
        source = source._replace(aliases=(*source.aliases, *own))
        tensors[base] = tensors[base]._replace(source=source)
    check_tree(encoded.node, [tensor.record for tensor in tensors], aliasing.storages)
    return StatePlan(tuple(tensors), aliasing.storages, encode_node(encoded.node), encoded.node)


def source_of_leaf(leaf: Leaf) -> Source:
    """The source of a leaf, which becomes the tensor of this process. Raises TypeError naming its
    path for what cannot be saved.
    """
    given = leaf.value
    try:
        leaf.value = local_tensor(given)
        source = source_of(leaf.value)
    except TypeError as error:
        raise TypeError(f"cannot save {render(leaf.path)}: {error}") from error
    return source if leaf.value is given else source._replace(aliases=(given,))


def _regions(leaves: Sequence[Leaf], sources: Sequence[Source]) -> list[Region | None]:
    """Where tensors lie in their storages, for those that are not alone in theirs."""
    keys = [
        # What is read by address is on the host and neither conjugated nor negated.
        source.held.address
        if source.address is not None and isinstance(source.held, HeldStorage)
        else _storage_key(leaf.value)
        for leaf, source in zip(leaves, sources, strict=True)
    ]
    members = Counter(keys)
    return [
        _region(leaf.value, key) if key is not None and members[key] > 1 else None
        for leaf, key in zip(leaves, keys, strict=True)
    ]


def _storage_key(value: Any) -> object:
    """Tells storages apart; None for what has none and shares nothing.

    What is saved of conjugated and negated tensors are their values, which are not the bytes in
    memory. They share with their like alone, of one dtype.
    """
    if not isinstance(value, torch.Tensor) or value._is_zerotensor():
        return None
    address = value.untyped_storage().data_ptr()
    key: object = address if value.is_cpu else (str(value.device), address)
    if value.is_conj() or value.is_neg():
        return key, value.is_conj(), value.is_neg(), value.dtype
    return key


def _region(value: torch.Tensor, key: object) -> Region:
    itemsize = value.element_size()
    offset = int(value.storage_offset()) * itemsize
    return Region(key, offset, itemsize, tuple(value.shape), value.stride(), value.dtype)


def _record(leaf: Leaf, source: Source, place: Stored) -> TensorRecord:
    storage = None if place.storage is None else (place.storage, place.offset)
    # What is read by address lies row by row already.
    strides = None if source.read is None else _strides_to_keep(leaf.value, place)
    return TensorRecord(leaf.name, source.element.name, source.shape, (), strides, storage)


def _strides_to_keep(value: Any, place: Stored) -> tuple[int, ...] | None:
    """Strides matter in a shared storage, and where they are a mere order of dimensions."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return None
    strides = tuple(value.stride())
    if place.storage is None and not is_dense(value.shape, strides):
        return None
    return strides


def _fill_view(leaf: Leaf, place: View, number: int, base: TensorRecord) -> None:
    """Says in the tree that a leaf is a view of tensor `number`."""
    value, node = leaf.value, leaf.node
    strides = value.stride()
    if place.is_twin:
        strides = base.strides or contiguous_strides(base.shape)
    node["view"] = [number, place.offset]
    node["dtype"] = str(value.dtype).removeprefix("torch.")
    node["shape"] = list(value.shape)
    node["strides"] = list(strides)
    _add_flags(node, value)


def _fill_node(leaf: Leaf, number: int) -> None:
    """Says in the tree that a leaf is tensor `number`."""
    value, node = leaf.value, leaf.node
    if type(value) is np.ndarray:
        node["array"] = number
        node["dtype"] = _array_dtype(leaf)
        return
    node["tensor"] = number
    if isinstance(value, torch.Tensor):
        _add_flags(node, value)


def _array_dtype(leaf: Leaf) -> Any:
    try:
        return encode_dtype(leaf.value.dtype)
    except TypeError as error:
        raise TypeError(f"cannot save {render(leaf.path)}: {error}") from error


def _add_flags(node: dict[str, Any], value: torch.Tensor) -> None:
    if value.requires_grad:
        node["requires_grad"] = True
    if type(value) is torch.nn.Parameter:
        node["parameter"] = True
    if not value.is_cpu:
        node["device"] = str(value.device)


def plan_files(
    state: StatePlan,
    *,
    uuid: str,
    rank: int,
    weights: Sequence[float],
    least_grain_nbytes: int = GRAIN_SIZES[0],
) -> list[FilePlan]:
    """Lays the tensors of a state out in one data file per stripe; stripes left empty get none.

    Raises ValueError if a data file's header would be longer than safetensors allows.
    """
    records = [tensor.record for tensor in state.tensors]
    kinds = [(record.dtype, record.shape) for record in records]
    parts = {kind: whole_part(*kind) for kind in set(kinds)}  # there are few different ones
    own = [parts[kind] for kind in kinds]
    nbytes = sum(tensor.source.nbytes for tensor in state.tensors)
    return plan_part_files(
        records,
        own,
        uuid=uuid,
        rank=rank,
        weights=weights,
        state_nbytes=nbytes,
        least_grain_nbytes=least_grain_nbytes,
    )


def plan_part_files(
    records: Sequence[TensorRecord],
    parts: Sequence[Part],
    *,
    uuid: str,
    rank: int,
    weights: Sequence[float],
    state_nbytes: int,
    least_grain_nbytes: int = GRAIN_SIZES[0],
) -> list[FilePlan]:
    """Lays parts of tensors out in data files; `records` name the tensor of each part.

    A file holds one part of a tensor at most, so that a second one goes to files of its own. Each
    rank has a file 0, be it empty. `Shard.tensor` is the index of the part. `state_nbytes` are
    those of all tensors, of all ranks.
    """
    kinds = [(record.dtype, record.shape) for record in records]
    grains_of = {  # there are few different ones
        kind: grain_bytes(whole_part(*kind).nbytes, state_nbytes, least_grain_nbytes)
        for kind in set(kinds)
    }
    grains = [grains_of[kind] for kind in kinds]
    files = []
    for layer, indices in enumerate(_layers(records)):
        stripes = plan_stripes([parts[index] for index in indices], weights)
        for stripe, own in enumerate(stripes):
            number = layer * len(weights) + stripe
            if own or number == 0:
                shards = own
                if not isinstance(indices, range):
                    shards = [shard._replace(tensor=indices[shard.tensor]) for shard in own]
                label = f"r{rank}-{number}"
                files.append(_plan_file(records, shards, grains, label, number, uuid))
    return files


def _layers(records: Sequence[TensorRecord]) -> list[Sequence[int]]:
    """Indices of the first part of every tensor, then those of the second ones, and so on."""
    if len({record.name for record in records}) == len(records):
        return [range(len(records))]
    times = Counter[str]()
    layers: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        layers.setdefault(times[record.name], []).append(index)
        times[record.name] += 1
    return [layers[layer] for layer in sorted(layers)] or [[]]


def _plan_file(
    records: Sequence[TensorRecord],
    shards: Sequence[Shard],
    grains: Sequence[int],
    label: str,
    number: int,
    uuid: str,
) -> FilePlan:
    entries = [_entry(records[shard.tensor], shard) for shard in shards]
    layout = plan_data_file(entries, label=label, metadata={"checkpoint": uuid, "file": label})
    names = tuple(entry.name for entry in entries)
    # A shard of one grain has a sum of it, as a block.
    sizes = (grains[shard.tensor] for shard in shards)
    own = (size if size < shard.nbytes else 0 for size, shard in zip(sizes, shards, strict=True))
    return FilePlan(number, tuple(shards), layout, names, tuple(own))


def whole_part(dtype: str, shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(elements.BY_NAME[dtype].itemsize, (0,) * len(shape), shape)


def _entry(record: TensorRecord, shard: Shard) -> Entry:
    element = elements.BY_NAME[record.dtype]
    _, start, shape, _, nbytes = shard
    suffix = element.file_suffix
    if suffix:
        start, shape = start + (0,) * len(suffix), shape + suffix
    return Entry(record.name, element.file_code, shape, start, nbytes)
