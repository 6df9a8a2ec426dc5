"""Checkpoints of ``torch.distributed.checkpoint``, as FSDP and others save them with
``get_state_dict``: `<any>.<parameter>` and `<any>.state.<parameter>.exp_avg` beside its `step`.

A tensor is read when it is wanted, and one at a time, whatever it was cut into. Torch keeps the
index of such a checkpoint (`.metadata`) as a pickle: read those alone that you trust.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.commands.foreign.state import (
    MOMENTS,
    WIDENED,
    ForeignState,
    Shelf,
    Shelved,
    check_dtype,
    check_kept,
    check_options,
    step_count,
)

METADATA = ".metadata"
_GROUPS = "param_groups."
_PARAMS = re.compile(r"[0-9]+\.params")


class _Checkpoint:
    """Its tensors by name."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata  # which is one large pickle

        self._path = path
        try:
            metadata = FileSystemReader(path).read_metadata()
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of whatever kind: the bytes of a pickle decide what is met
            raise ValueError(
                f"{path / METADATA} is no index of torch.distributed.checkpoint ({error!r}); copy "
                "the checkpoint again, whole"
            ) from error
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

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Options of groups, which are numbers, flags and names, or tensors of one number."""
        target: dict[str, Any] = {name: None for name in names if self.shape(name) is None}
        if target:
            self._load(target)
        tensors = {name: self.read(name) for name in names if name not in target}
        return target | {n: t.item() if t.numel() == 1 else t for n, t in tensors.items()}

    def _load(self, target: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():  # that there is one process, which is what is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                load(target, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:  # which is no Exception
                causes = [failure for failure, _ in error.failures.values()][:1]
                if not isinstance(causes[0], Exception):
                    raise causes.pop() from None  # an interrupt
                raise ValueError(
                    f"{', '.join(list(target)[:3])} of {self._path} cannot be read "
                    f"({causes[0]!r}); copy the checkpoint again, whole"
                ) from error

    def source(self, name: str) -> Shelved:
        """As it is. Raises ``ValueError`` for what is no tensor."""
        shape = self.shape(name)
        if shape is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        return Shelved(self._shelf, name, shape, self.entries[name].properties.dtype)

    def widened(self, name: str) -> Shelved:
        """As float32. Raises ``ValueError`` for one that may have values which that lacks, too."""
        source = self.source(name)
        check_dtype(source.dtype, name, self._path, *WIDENED)
        return Shelved(self._shelf, name, source.shape, torch.float32)


def read_distributed(path: Path, model: nn.Module) -> ForeignState:
    """Raises ``ValueError`` where it cannot be told by their names which tensors are meant."""
    found = _Checkpoint(path)
    names = [name for name, _ in model.named_parameters()]
    _check_named(_first_moments(found), path)
    of_state = _prefix(_first_moments(found), names, path)
    of_model = _prefix(_weights(found, of_state), names, path)
    kept = _kept(found)
    moments, steps = {}, {}
    for name in names:
        key = f"{of_state}{name}"
        if key in kept:
            check_kept(kept[key], name, path)
            first, second = (found.widened(f"{key}.{part}") for part in MOMENTS)
            moments[name] = (first, second)
            steps[name] = _step(found, f"{key}.step", path)

    def has(name: str) -> bool:
        return found.shape(of_model + name) is not None

    weights = {
        n: (found.widened if n in moments else found.source)(of_model + n) for n in names if has(n)
    }
    buffers = {n: found.source(of_model + n) for n, _ in model.named_buffers() if has(n)}
    there = {
        key.removeprefix(of_state) for key in _first_moments(found) if key.startswith(of_state)
    }
    groups, is_grouped = _groups(found, of_state, path)
    return ForeignState(
        weights=weights,
        buffers=buffers,
        moments=moments,
        steps=steps,
        groups=groups,
        is_grouped=is_grouped,
        is_whole=bool(weights or buffers),
        others=sorted(there - {*names}),
    )


def _first_moments(found: _Checkpoint) -> list[str]:
    """What has a first moment: prefix and name of each parameter."""
    ending = f".{MOMENTS[0]}"
    return [key.removesuffix(ending) for key in found.entries if key.endswith(ending)]


def _weights(found: _Checkpoint, of_state: str) -> list[str]:
    """Tensors that are none of the optimizer's. Its place tells them, and not the word `state`,
    which may be in any other name, or what programs call all that they save.
    """
    return [
        key
        for key in found.entries
        if found.shape(key) is not None and not (of_state and key.startswith(of_state))
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


def _groups(found: _Checkpoint, of_state: str, path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The groups of the optimizer whose state is under ``of_state``, with their options, and
    whether they are listed; none where there are no options. Raises ``ValueError`` for those of
    another optimizer.
    """
    root, inside, prefix = of_state.rpartition("state.")
    first = f"{root}{_GROUPS}"
    keys = [key for key in found.entries if inside and key.startswith(first)]
    values = {key.removeprefix(first): value for key, value in found.values(keys).items()}
    is_listed = any(_PARAMS.fullmatch(key) for key in values)
    groups = _listed(values) if is_listed else _by_options(values)
    for group in groups:
        check_options(group, path)
        group["params"] = [name.removeprefix(prefix) for name in group["params"]]
    return groups, is_listed


def _listed(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`0.lr`, `0.params`: an option of a group by its number."""
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        number, _, option = key.partition(".")
        groups.setdefault(int(number), {})[option] = value
    return [groups[number] for number in sorted(groups)]


def _by_options(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`up.weight.lr`: an option of a parameter. Those with the same ones are a group."""
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, option = key.rpartition(".")
        by_name.setdefault(name, {})[option] = value
    groups: list[dict[str, Any]] = []
    for name, options in by_name.items():
        group = next((g for g in groups if {**g, "params": 0} == {**options, "params": 0}), None)
        if group is None:
            groups.append(group := {**options, "params": []})
        group["params"].append(name)
    return groups


def _check_named(keys: Sequence[str], path: Path) -> None:
    if keys and all(key.rpartition(".")[2].isdecimal() for key in keys):
        raise ValueError(
            f"{path} numbers the parameters of the optimizer; save what "
            "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) gives, which "
            "names them"
        )


def _step(found: _Checkpoint, key: str, path: Path) -> int:
    if found.shape(key) is None:
        raise ValueError(f"{path} has no tensor {key}: how many steps it is from is not known")
    return step_count(found.read(key), key, path)
