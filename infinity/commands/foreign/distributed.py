"""Checkpoints of ``torch.distributed.checkpoint``, as FSDP and others save them with
``get_state_dict``: `<any>.<parameter>` and `<any>.state.<parameter>.exp_avg` beside its `step`.

A tensor is read when it is wanted, and one at a time, whatever it was cut into. Torch keeps the
index of such a checkpoint (`.metadata`) as a pickle: read those alone that you trust.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.commands.foreign.state import MOMENTS, ForeignState, Shelf, Shelved

METADATA = ".metadata"


class _Checkpoint:
    """Its tensors by name."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata  # which is one large pickle

        metadata = FileSystemReader(path).read_metadata()
        self._reader = Reader(path)
        self._shelf = Shelf(self.read)
        self.entries: dict[str, Any] = metadata.state_dict_metadata

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None for what is no tensor, or not there."""
        size = getattr(self.entries.get(name), "size", None)
        return None if size is None else tuple(size)

    def read(self, name: str) -> torch.Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        entry = self.entries[name]
        target = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():  # that there is one process, which is what is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(target, storage_reader=self._reader, no_dist=True)
        return target[name]

    def source(self, name: str) -> Shelved:
        shape = self.shape(name)
        if shape is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return Shelved(self._shelf, name, shape)


def read_distributed(path: Path, model: nn.Module) -> ForeignState:
    """Raises ``ValueError`` where no parameter of the model has state, or it is under two names."""
    found = _Checkpoint(path)
    weights, moments, steps = {}, {}, {}
    for name, _ in model.named_parameters():
        state = _state_of(found, name, path)
        if state is not None:
            first, second = (found.source(f"{state}.{part}") for part in MOMENTS)
            moments[name] = (first, second)
            steps[name] = _step(found, f"{state}.step", path)
        weight = _weight_of(found, name, path)
        if weight is not None:
            weights[name] = found.source(weight)
    return ForeignState(weights=weights, moments=moments, steps=steps)


def _state_of(found: _Checkpoint, name: str, path: Path) -> str | None:
    """What the names of the state of a parameter begin with."""
    ending = f"state.{name}.{MOMENTS[0]}"
    keys = [key for key in found.entries if key == ending or key.endswith(f".{ending}")]
    only = _only(keys, name, path)
    return None if only is None else only.removesuffix(f".{MOMENTS[0]}")


def _weight_of(found: _Checkpoint, name: str, path: Path) -> str | None:
    whole = [key for key in (name, f"model.{name}") if found.shape(key) is not None]
    if whole:
        return whole[0]
    keys = [key for key in found.entries if key.endswith(f".{name}") and ".state." not in key]
    return _only([key for key in keys if found.shape(key) is not None], name, path)


def _only(keys: list[str], name: str, path: Path) -> str | None:
    if len(keys) > 1:
        raise ValueError(f"{path} has {name} under several names: {', '.join(sorted(keys)[:3])}")
    return keys[0] if keys else None


def _step(found: _Checkpoint, key: str, path: Path) -> int:
    if found.shape(key) is None:
        raise ValueError(f"{path} has no tensor {key}: how many steps it is from is not known")
    return int(found.read(key).item())
