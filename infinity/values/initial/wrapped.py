"""Weights of a model that was wrapped after it was made, such as by adapters: its parameters are
those of the files, under whatever names they have now; what was put around it keeps its values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from infinity.parameters.first_values import StoredValues
from infinity.parameters.records import Record, records_of
from infinity.values.initial.materialize import WeightFiles
from infinity.values.initial.weight_files import listed


class WeightsOf(os.PathLike[str]):
    """A folder of weights, for ``weights=``, that knows which of them a parameter is to have.

    ``plain`` is the model as the files have it, on the meta device; ``names`` has the name there
    of each parameter that is in a model around it now.
    """

    def __init__(self, plain: nn.Module, folder: Path, names: Mapping[nn.Parameter, str]) -> None:
        self._plain = plain
        self._folder = folder
        self._names = names

    def __fspath__(self) -> str:
        return os.fspath(self._folder)

    def values_for(self, model: nn.Module, records: Sequence[Record]) -> WrappedFiles:
        """Raises ``ValueError`` naming what has no values."""
        files = WeightFiles(self._plain, records_of(self._plain, None), self._folder)
        return WrappedFiles(files, self._plain, records, self._names)


class WrappedFiles:
    """First values of the parameters with ``names`` from ``files``, of others their own.

    Raises ``ValueError`` naming one on the meta device that has none, or has another shape.
    """

    def __init__(
        self,
        files: WeightFiles,
        plain: nn.Module,
        records: Sequence[Record],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._files = files
        self._inner = records_of(plain, None)
        self._buffers = {name for name, _ in plain.named_buffers()}
        self._own = [record for record in records if record.parameter not in names]
        without = [record.name for record in self._own if record.parameter.is_meta]
        if without:
            raise ValueError(
                f"{listed(without)} is on the meta device, and not one of the parameters that "
                f"{files.path} has values for: it was made after the model; give it values, or "
                "build the model with real tensors"
            )
        self._taken: dict[str, list[Record]] = {}
        for record in records:
            if record.parameter in names:
                self._taken.setdefault(names[record.parameter], []).append(record)
        self._check_shapes()

    def _check_shapes(self) -> None:
        for inner in self._inner:
            for record in self._taken.get(inner.name, ()):
                if tuple(record.shape) != tuple(inner.shape):
                    raise ValueError(
                        f"{record.name} is of shape {tuple(record.shape)}, and of "
                        f"{tuple(inner.shape)} in {self._files.path}"
                    )

    def parameters(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[Record, torch.Tensor | StoredValues]]:
        for inner, values in self._files.parameters(self._inner):
            for record in self._taken.get(inner.name, ()):
                yield record, values
        for record in self._own:
            yield record, record.parameter

    def buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Those of the model have the names that they have in it, with more before."""
        known = [own for own in self._buffers if name == own or name.endswith(f".{own}")]
        return self._files.buffer(max(known, key=len), buffer) if known else buffer
