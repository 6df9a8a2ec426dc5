"""First values of a model from a checkpoint of ours, whoever saved it: one process or several
ranks, on one SSD or on stripes.

Every byte is verified; of a partitioned parameter a rank reads what it keeps alone, in whole
checksum blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from checkpoint.format.checksum import CRC_BLOCK_BYTES
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.tree import data_nodes
from checkpoint.loading.opened import KEPT_BYTES, open_current
from checkpoint.tensors.assembly import TensorView, view_of
from checkpoint.tensors.sources import ByteSource
from infinity.parameters.first_values import StoredValues
from infinity.parameters.records import Record
from infinity.values.initial.initialisers import Initialisers
from infinity.values.initial.saved_masters import master_beside, says_training
from infinity.values.initial.weight_files import converts, listed
from infinity.values.initial.weight_names import prefix_of, remedy_for
from swap.plain import same_bits

_log = logging.getLogger(__name__)
_COMPARED = 1 << 18
"""Elements that are compared at a time."""
_OF_SNAPSHOTS = {"contents.groups", "contents.segments", "contents.ranges"}


def is_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint of ours at ``path``, and not just files of weights."""
    return (path / MANIFEST_NAME).is_file()


class CheckpointValues:
    """Values from a checkpoint, found by parameter name with or without the ``model.`` that
    ``offloaded.save`` puts before it, with the masters that this has beside them. See
    ``first_values.Values``.

    Raises ``ValueError`` naming all that is missing or has another shape, and what
    ``checkpoint.load`` raises for a checkpoint that is not whole.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record], path: Path) -> None:
        self._path = path
        self._initialisers = Initialisers(model)
        self._opened = open_current(
            path.resolve(), kept_bytes=CRC_BLOCK_BYTES, most_kept_bytes=KEPT_BYTES
        )
        self._manifest = self._opened.manifest
        self._nodes = data_nodes(self._manifest.tree)
        self._has_masters = says_training(self._manifest)
        names = {record.index: names_of(model, record) for record in records}
        buffers = [name for name, _ in model.named_buffers()]
        every = [name for known in names.values() for name in known]
        self._prefix = prefix_of([*every, *buffers], self._nodes, ("model.", ""))
        found = {index: self._find(known) for index, known in names.items()}
        self._found = {index: values for index, values in found.items() if values is not None}
        misfits = self._misfits(records, [*every, *buffers])
        if misfits.missing and self._nodes.keys() >= _OF_SNAPSHOTS:
            raise ValueError(
                f"weights={path} is a snapshot, whose values are in swap files; write it elsewhere "
                f"by offloaded.save(path, snapshot={path.name!r}), in a block with the nvme "
                "directories that it is on, and give that path"
            )
        check_fit(model, path, with_buffers(misfits, model, self._buffers(model)))

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, StoredValues]]:
        try:
            for record in records:
                yield record, self._found[record.index]
        finally:  # of the budget there is nothing for what was read last
            self._opened.forget_blocks()

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        found = self._find([name])
        if found is not None:
            try:
                return found.whole().to(buffer.dtype)
            finally:
                self._opened.forget_blocks()
        if buffer.is_meta:
            return self._initialisers.buffer(name, not_in=self._path)
        return buffer

    def _misfits(self, records: Sequence[Record], names: Sequence[str]) -> Misfits:
        known = {self._prefix + name for name in names}
        found = [(record, self._found.get(record.index)) for record in records]
        return Misfits(
            missing=[record.name for record, values in found if values is None],
            wrong=[
                f"{record.name} ({values.shape}, {tuple(record.shape)} in the model)"
                for record, values in found
                if values is not None and values.shape != tuple(record.shape)
            ],
            foreign=[
                f"{record.name} ({values.source.dtype}, {record.parameter.dtype} in the model)"
                for record, values in found
                if values is not None and not converts(values.source.dtype, record.parameter.dtype)
            ],
            # Of a training checkpoint, what is beside the model is meant for other things.
            extra=[
                name for name in self._nodes if name.startswith(self._prefix) and name not in known
            ],
        )

    def _buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of those that are stored, as tensors on the meta device."""
        found = {
            name: self._find([name]) for name, _ in model.named_buffers(remove_duplicate=False)
        }
        return {
            name: torch.empty(values.shape, dtype=values.source.dtype, device="meta")
            for name, values in found.items()
            if values is not None
        }

    def _find(self, names: Sequence[str]) -> StoredValues | None:
        """Raises ``ValueError`` for names of one parameter that have different values."""
        found = [name for name in names if self._prefix + name in self._nodes]
        if not found:
            return None
        values = dict(map(self._values, found))
        first, *others = values.values()
        if not all(are_equal(first, other) for other in others):
            raise ValueError(
                f"{listed(found)} are one tied parameter of the model and have different values in "
                f"{self._path}; build the model without tying them (tie_word_embeddings=False)"
            )
        return first

    def _values(self, name: str) -> tuple[TensorView, StoredValues]:
        """What is stored under a name; equal for names of the same bytes."""
        stored = self._prefix + name
        view = self._view(stored)
        source = self._opened.source(view)
        master = None
        if self._has_masters:
            master = master_beside(source, stored, self._nodes, self._source)
        origin = f"{stored} of checkpoint {self._manifest.uuid}"
        return view, StoredValues(source, tuple(source.shape), origin, master)

    def _view(self, stored: str) -> TensorView:
        return view_of(self._manifest, *self._nodes[stored])

    def _source(self, stored: str) -> ByteSource:
        return self._opened.source(self._view(stored))


def are_equal(one: StoredValues, other: StoredValues) -> bool:
    """Whether they are the same numbers, in as much precision as they are stored with."""
    one, other = one.exact(), other.exact()
    dtypes = one.source.dtype, other.source.dtype
    if one.shape != other.shape or not converts(*dtypes):
        return False
    dtype, numel = torch.promote_types(*dtypes), math.prod(one.shape)
    return all(
        same_bits(
            one.read(first, min(_COMPARED, numel - first)).to(dtype),
            other.read(first, min(_COMPARED, numel - first)).to(dtype),
        )
        for first in range(0, numel, _COMPARED)
    )


@dataclass(frozen=True, slots=True)
class Misfits:
    """What of stored weights does not fit a model: names, with what is wrong of them."""

    missing: Sequence[str]
    wrong: Sequence[str]
    """Of another shape."""
    foreign: Sequence[str]
    """Of a dtype that is no other precision of the model's."""
    extra: Sequence[str]


def with_buffers(misfits: Misfits, model: nn.Module, stored: Mapping[str, torch.Tensor]) -> Misfits:
    """And what of ``stored`` does not fit the buffers of ``model``. They take other dtypes as
    ``load_state_dict`` does, but for kinds of numbers that would lose what they are.
    """
    pairs = [
        (name, stored[name], buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name in stored
    ]
    wrong = [
        f"{name} ({tuple(found.shape)}, {tuple(buffer.shape)} in the model)"
        for name, found, buffer in pairs
        if found.shape != buffer.shape
    ]
    foreign = [
        f"{name} ({found.dtype}, {buffer.dtype} in the model)"
        for name, found, buffer in pairs
        if not torch.can_cast(found.dtype, buffer.dtype)
    ]
    return replace(misfits, wrong=[*misfits.wrong, *wrong], foreign=[*misfits.foreign, *foreign])


def check_fit(model: nn.Module, path: Path, misfits: Misfits) -> None:
    """Raise ``ValueError`` that names all of it unless weights fit the model; what it has no use
    for is no error, and is logged.
    """
    unused = f"not used: {listed(misfits.extra)}"
    if not (misfits.missing or misfits.wrong or misfits.foreign):
        if misfits.extra:
            _log.warning("%s has tensors that %s has not; %s", path, type(model).__name__, unused)
        return
    found = [f"missing: {listed(misfits.missing)}"] if misfits.missing else []
    found += [f"of another shape: {listed(misfits.wrong)}"] if misfits.wrong else []
    if misfits.foreign:
        found.append(f"quantised or of another kind of number: {listed(misfits.foreign)}")
    found += [unused] if misfits.extra else []
    raise ValueError(
        f"weights={path} do not fit {type(model).__name__}; {'; '.join(found)}; if these are the "
        f"weights of this model, {remedy_for(model)}"
    )


def names_of(model: nn.Module, record: Record) -> list[str]:
    """Every name that a (tied) parameter has in the model's state dict."""
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is record.parameter
    ]
