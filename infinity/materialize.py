"""Where the first values of a model come from: its own tensors, a file of weights, a checkpoint,
or its own initialisation.

Values are produced one module at a time, so a model on the meta device is never in memory as a
whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from infinity.discovery import Record
from infinity.initialisers import Initialisers
from infinity.sharing import Sharing
from infinity.stored_values import CheckpointValues, StoredValues, is_checkpoint, names_of
from swap.tiered import TieredState


class Values(Protocol):
    """A source of first values."""

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        """Every record with its values, in any order."""

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """The real values of a buffer."""


def values_for(
    model: nn.Module, records: Sequence[Record], weights: str | os.PathLike[str] | None
) -> Values:
    """The source for ``model``. Raises ``ValueError``/``FileNotFoundError`` naming what has no
    values.
    """
    if weights is not None:
        path = Path(weights)
        kind = CheckpointValues if is_checkpoint(path) else WeightFiles
        return kind(model, records, path)
    if any(record.parameter.is_meta for record in records):
        return Initialisation(model, records)
    return OwnValues()


def fill_all(
    state: TieredState, records: Sequence[Record], values: Values, sharing: Sharing
) -> None:
    """Bring all first values home; shows progress when it takes long."""
    with tqdm(
        total=sum(record.weight_bytes for record in records),
        desc="offloading",
        unit="B",
        unit_scale=True,
        delay=1.0,
        leave=False,
        disable=None,
    ) as progress:
        for found, tensor in values.parameters(records):
            record = records[found.index]  # a source may know it as it was before it was cut
            state.fill(record.index, sharing.note(record, tensor))
            progress.update(record.weight_bytes)


class OwnValues:
    """The tensors that the model came with."""

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        for record in records:
            yield record, record.parameter

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


class Initialisation:
    """A model on meta, initialised as its modules would initialise themselves."""

    def __init__(self, model: nn.Module, records: Sequence[Record]) -> None:
        # Kept now: layers may leave the model while it is offloaded, see ``tiling``.
        self._modules = list(model.modules())
        self._initialisers = Initialisers(model)
        self._by_id = {id(record.parameter): record for record in records}
        self._initialisers.check([r.parameter for r in records if r.parameter.is_meta])
        for name, buffer in model.named_buffers():
            self.buffer(name, buffer)  # raises now, before anything is begun

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        done: set[int] = set()
        for module in self._modules:
            own = [p for p in module._parameters.values() if p is not None and id(p) not in done]
            done.update(id(p) for p in own)
            missing = [p for p in own if p.is_meta]
            for parameter in own:
                if not parameter.is_meta:
                    yield self._by_id[id(parameter)], parameter
            for parameter, values in zip(
                missing, self._initialisers.parameters(missing), strict=True
            ):
                yield self._by_id[id(parameter)], values

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._initialisers.buffer(name) if buffer.is_meta else buffer


class WeightFiles:
    """Values from safetensors: one file, or a folder of them, as Hugging Face shards are.

    Tensors are found by parameter name, with or without a ``model.`` before it.
    """

    def __init__(self, model: nn.Module, records: Sequence[Record], path: Path) -> None:
        self._where: dict[str, Path] = {}
        for file in _safetensors_files(path):
            with safe_open(file, framework="pt") as opened:
                self._where.update(dict.fromkeys(opened.keys(), file))
        self._path = path
        self._initialisers = Initialisers(model)
        self._names = {record.index: self._find(names_of(model, record)) for record in records}
        for record in records:
            self._check_shape(record)

    def parameters(self, records: Sequence[Record]) -> Iterator[tuple[Record, torch.Tensor]]:
        for record in records:
            yield record, self._read(self._names[record.index])

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if name in self._where or f"model.{name}" in self._where:
            return self._read(self._find([name]))
        if buffer.is_meta:
            return self._initialisers.buffer(name, not_in=self._path)
        return buffer

    def _find(self, names: Sequence[str]) -> str:
        for name in names:
            for candidate in (name, f"model.{name}"):
                if candidate in self._where:
                    return candidate
        raise ValueError(f"{names[0]} is not among the {len(self._where)} tensors of {self._path}")

    def _check_shape(self, record: Record) -> None:
        name = self._names[record.index]
        with safe_open(self._where[name], framework="pt") as opened:
            shape = tuple(opened.get_slice(name).get_shape())
        if shape != tuple(record.shape):
            raise ValueError(
                f"{name} of {self._path} has shape {shape}, the model has {tuple(record.shape)}"
            )

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._where[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor


def _safetensors_files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"weights={path} does not exist")
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    if not files:
        raise ValueError(f"weights={path} holds no .safetensors file")
    return files
