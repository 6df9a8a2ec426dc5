"""First values of a model from a checkpoint of ours, whoever saved it: one process or several
ranks, on one SSD or on stripes.

Every byte is verified; of a partitioned parameter a rank reads what it keeps alone, in whole
checksum blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from checkpoint.assembly import view_of
from checkpoint.manifest import MANIFEST_NAME
from checkpoint.opened import open_current
from checkpoint.sources import ByteSource
from checkpoint.tree import data_nodes
from infinity.discovery import Record
from infinity.initialisers import Initialisers
from infinity.weight_files import listed
from infinity.weight_names import remedy_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredValues:
    """A tensor, or rows of one, whose values are in a checkpoint until they are read.

    ``origin`` tells them from other values, and is the same on every rank that reads the same ones.
    """

    source: ByteSource
    shape: tuple[int, ...]
    origin: str
    first: int = 0

    def __getitem__(self, rows: slice) -> StoredValues:
        """Rows of it."""
        start, stop, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:])
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            origin=f"{self.origin}[{start}:{stop}]",
            first=self.first + start * row,
        )

    def read(self, first: int, numel: int) -> torch.Tensor:
        """Elements ``[first, first + numel)`` in a row. Raises ``CorruptCheckpointError``,
        ``AioError``.
        """
        out = torch.empty(numel, dtype=self.source.dtype)
        if numel:
            start = (self.first + first) * out.itemsize
            self.source.read(start, out.view(torch.uint8).numpy().data)
        return out

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.read(0, math.prod(self.shape)).view(self.shape)


def is_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint of ours at ``path``, and not just files of weights."""
    return (path / MANIFEST_NAME).is_file()


class CheckpointValues:
    """Values from a checkpoint, found by parameter name with or without the ``model.`` that
    ``offloaded.save`` puts before it. See ``materialize.Values``.

    Raises ``ValueError`` naming all that is missing or has another shape, and what
    ``checkpoint.load`` raises for a checkpoint that is not whole.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record], path: Path) -> None:
        self._path = path
        self._initialisers = Initialisers(model)
        self._opened = open_current(path.resolve())
        self._manifest = self._opened.manifest
        self._nodes = data_nodes(self._manifest.tree)
        found = {record.index: self._find(names_of(model, record)) for record in records}
        self._found = {index: values for index, values in found.items() if values is not None}
        missing = [record.name for record in records if found[record.index] is None]
        wrong = [
            f"{record.name} ({self._found[record.index].shape}, {tuple(record.shape)} in the model)"
            for record in records
            if record.index in self._found
            and self._found[record.index].shape != tuple(record.shape)
        ]
        check_fit(model, path, missing, wrong, [])

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, StoredValues]]:
        for record in records:
            yield record, self._found[record.index]

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        found = self._find([name])
        if found is not None:
            return found.whole()
        if buffer.is_meta:
            return self._initialisers.buffer(name, not_in=self._path)
        return buffer

    def _find(self, names: Sequence[str]) -> StoredValues | None:
        for name in names:
            for candidate in (f"model.{name}", name):
                if candidate in self._nodes:
                    where, node = self._nodes[candidate]
                    source = self._opened.source(view_of(self._manifest, where, node))
                    origin = f"{candidate} of checkpoint {self._manifest.uuid}"
                    return StoredValues(source, tuple(source.shape), origin)
        return None


def check_fit(
    model: nn.Module,
    path: Path,
    missing: Sequence[str],
    wrong: Sequence[str],
    extra: Sequence[str],
) -> None:
    """Raise ``ValueError`` that names all of it unless weights fit the model; what it has no use
    for is no error, and is logged.
    """
    unused = f"not used: {listed(extra)}"
    if not (missing or wrong):
        if extra:
            _log.warning("%s has tensors that %s has not; %s", path, type(model).__name__, unused)
        return
    found = [f"missing: {listed(missing)}"] if missing else []
    found += [f"of another shape: {listed(wrong)}"] if wrong else []
    found += [unused] if extra else []
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
