"""Checkpoints of ``torch.distributed.checkpoint``, as FSDP and others save them with
``get_state_dict``: `<any>.<parameter>` and `<any>.state.<parameter>.exp_avg` beside its `step`.

A tensor is read when it is wanted, and one at a time, whatever it was cut into. Torch keeps the
index of such a checkpoint (`.metadata`) as a pickle: read those alone that you trust.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.commands.foreign.state import (
    MOMENTS,
    ForeignState,
    Shelf,
    Shelved,
    check_decay,
    check_kept,
)

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
        entry = self.entries[name]
        target = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        self._load(target)
        return target[name]

    def value(self, name: str) -> Any:
        """What is no tensor: a number or a flag of the options. None where it is not there."""
        if name not in self.entries:
            return None
        if self.shape(name) is not None:
            return self.read(name).item()
        target: dict[str, Any] = {name: None}
        self._load(target)
        return target[name]

    def _load(self, target: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():  # that there is one process, which is what is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(target, storage_reader=self._reader, no_dist=True)

    def source(self, name: str) -> Shelved:
        shape = self.shape(name)
        if shape is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return Shelved(self._shelf, name, shape)


def read_distributed(path: Path, model: nn.Module) -> ForeignState:
    """Raises ``ValueError`` where it cannot be told by their names which tensors are meant."""
    found = _Checkpoint(path)
    names = [name for name, _ in model.named_parameters()]
    of_state = _prefix(_first_moments(found), names, path)
    of_model = _prefix(_weights(found), names, path)
    kept = _kept(found)
    moments, steps = {}, {}
    for name in names:
        key = f"{of_state}{name}"
        if f"{key}.{MOMENTS[0]}" in found.entries:
            check_kept(kept[key], name, path)
            first, second = (found.source(f"{key}.{part}") for part in MOMENTS)
            moments[name] = (first, second)
            steps[name] = _step(found, f"{key}.step", path)
    _check_decay(found, path)
    wanted = [*names, *(name for name, _ in model.named_buffers())]
    weights = {
        n: found.source(of_model + n) for n in wanted if found.shape(of_model + n) is not None
    }
    there = {
        key.removeprefix(of_state) for key in _first_moments(found) if key.startswith(of_state)
    }
    return ForeignState(
        weights={name: weights[name] for name in names if name in weights},
        buffers={name: weights[name] for name in weights if name not in names},
        moments=moments,
        steps=steps,
        is_whole=bool(weights),
        others=sorted(there - {*names}),
    )


def _first_moments(found: _Checkpoint) -> list[str]:
    """What has a first moment: prefix and name of each parameter."""
    ending = f".{MOMENTS[0]}"
    return [key.removesuffix(ending) for key in found.entries if key.endswith(ending)]


def _weights(found: _Checkpoint) -> list[str]:
    return [
        key for key in found.entries if ".state." not in f".{key}" and found.shape(key) is not None
    ]


def _prefix(keys: Sequence[str], names: Sequence[str], path: Path) -> str:
    """What stands before the most of ``names`` in ``keys``."""
    ends = {*names}
    counts = Counter(
        key[:at] for key in keys for at in _beginnings(key) if key[at:] in ends
    ).most_common(2)
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        first, second = (prefix or "no prefix" for prefix, _ in counts)
        raise ValueError(
            f"{path} has the parameters of the model twice: under {first} and {second}"
        )
    return counts[0][0] if counts else ""


def _beginnings(key: str) -> Iterator[int]:
    """Where a name may begin in ``key``."""
    yield 0
    for at, letter in enumerate(key):
        if letter == ".":
            yield at + 1


def _kept(found: _Checkpoint) -> dict[str, set[str]]:
    """What is kept under each name."""
    kept: dict[str, set[str]] = {}
    for entry in found.entries:
        owner, _, last = entry.rpartition(".")
        kept.setdefault(owner, set()).add(last)
    return kept


def _check_decay(found: _Checkpoint, path: Path) -> None:
    """By the options of the groups, where they are there."""
    for key in found.entries:
        if key.endswith(".decoupled_weight_decay"):
            decay = f"{key.removesuffix('decoupled_weight_decay')}weight_decay"
            options = {
                "decoupled_weight_decay": found.value(key),
                "weight_decay": found.value(decay),
            }
            check_decay(options, path)


def _step(found: _Checkpoint, key: str, path: Path) -> int:
    if found.shape(key) is None:
        raise ValueError(f"{path} has no tensor {key}: how many steps it is from is not known")
    return int(found.read(key).item())
