"""What a load of a checkpoint fills, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint.directory.locate import with_current_manifest
from checkpoint.directory.relocation import Relocation
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.slices import may_overlap_itself
from checkpoint.loading.into import check_into
from checkpoint.outside import raised_as_they_are
from checkpoint.plan.selection import Selection
from infinity.values import saved_state
from infinity.values.checkpoint_tensors import CheckpointTensor, checkpoint_tensors_of
from infinity.values.component_bytes import MASTER_COMPONENTS, ComponentBytes, components_of_tensor
from infinity.values.module_state import persistent_buffers
from infinity.values.persistence import TrainingState
from infinity.values.rank_state import own_buffers, own_parts


def check_targets(path: Path, moved: Relocation, tree: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless everything that is read into what is there fits it."""
    names = names_of(tree)
    if not names:  # all is converted
        return
    selection = Selection(names)
    try:
        with raised_as_they_are():
            check = partial(check_into, into=tree, selection=selection)
            with_current_manifest(path, check, moved)
    except CorruptCheckpointError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{path} does not fit the model, which is left as it was ({error}); load it into a "
            "model like the one that was saved"
        ) from error


@dataclass(frozen=True, slots=True)
class Targets:
    """What a load fills."""

    same: dict[str, Any]
    """A tree of what is read as it was saved."""
    converted: list[CheckpointTensor]
    """Weights that were saved in another dtype."""
    recast: list[tuple[CheckpointTensor, ComponentBytes]]
    """State of the optimizer that was."""
    bare: list[CheckpointTensor]
    """Weights without a master, which have one here."""
    buffers: frozenset[str]
    """Those that were saved in another dtype, or that share memory: what is loaded last stays."""
    own: dict[str, Any]
    """What this rank saved for itself; its buffers are in none of the others."""


def targets_of(
    training: TrainingState, saved: Mapping[str, Any], read: Callable[..., Any]
) -> Targets:
    """Raises ``ValueError`` naming a weight that is of another kind of numbers here, and a buffer
    that is to be converted and cannot be. ``read`` is ``checkpoint.load`` of it.
    """
    here = persistent_buffers(training.model)
    parts = own_parts(read, training.rank_context.rank, saved)
    own = own_buffers(parts, training.model)
    for name, stored in own.items():
        if stored is not None and name in here:
            _check_buffer(name, stored, here[name])
    of_all = {name: b for name, b in here.items() if saved["buffers"].get(name) and name not in own}
    others = _buffers_by_themselves(of_all, saved, read)
    buffers = {name: buffer for name, buffer in of_all.items() if name not in others}
    same: dict[str, Any] = {"model": dict(buffers), "optimizer": {}}
    converted, recast, bare = [], [], []
    for leaf in checkpoint_tensors_of(training.model, training.records):
        if not saved["planes"][leaf.name]:  # saved without what was frozen: it stays as it is
            continue
        is_converted = saved["dtypes"][leaf.name] != leaf.first.spec.dtype
        _check_kind(leaf.name, saved["dtypes"][leaf.name], leaf.first.spec.dtype)
        for component in components_of_tensor(training.state, leaf, None):
            name = component.component.name
            if is_converted and name in MASTER_COMPONENTS:
                continue
            if name not in saved["planes"][leaf.name]:
                if name in MASTER_COMPONENTS:
                    bare.append(leaf)
                continue
            if name == "weight":
                same["model"][leaf.name] = component
            elif saved_state.must_cast(training.rule, saved, leaf, component):
                recast.append((leaf, component))
            else:
                same["optimizer"].setdefault(name, {})[leaf.name] = component
        if is_converted:
            converted.append(leaf)
    return Targets(same, converted, recast, bare, others, parts)


def _buffers_by_themselves(
    here: Mapping[str, torch.Tensor], saved: Mapping[str, Any], read: Callable[..., Any]
) -> frozenset[str]:
    if not here:
        return frozenset()
    tree = read(only=[literal(f"model.{name}") for name in here], map_location="meta")["model"]
    num_users = Counter(map(_memory, here.values()))
    found = set()
    for name, buffer in here.items():
        stored = tree[name]
        is_read_into = stored.dtype == buffer.dtype and not saved.get("is_foreign")
        if is_read_into and num_users[_memory(buffer)] == 1:
            continue
        _check_buffer(name, stored, buffer)
        found.add(name)
    return frozenset(found)


def _check_buffer(name: str, stored: torch.Tensor, buffer: torch.Tensor) -> None:
    if stored.shape != buffer.shape:
        raise ValueError(
            f"{name} has shape {list(stored.shape)} in the checkpoint, {list(buffer.shape)} in "
            "the model, which is left as it was; load it into a model like the one that was "
            "saved"
        )
    _check_kind(name, stored.dtype, buffer.dtype)
    is_strided = buffer.layout == torch.strided
    if is_strided and may_overlap_itself(buffer.shape, buffer.stride()):
        raise ValueError(
            f"{name} is a buffer whose elements share memory with each other, as expanded ones "
            "do, in the model, which is left as it was; give it memory by clone()"
        )


def _memory(buffer: torch.Tensor) -> object:
    """The same for buffers that may lie in one another's memory."""
    is_plain = buffer.layout == torch.strided and not (buffer.is_meta or buffer.is_nested)
    return buffer.untyped_storage()._cdata if is_plain else id(buffer)


def _check_kind(name: str, stored: torch.dtype, here: torch.dtype) -> None:
    """Floats are rounded, as to another ``compute_dtype``. Codes are not numbers of another dtype,
    nor is a complex number what it has of real ones.
    """
    is_rounded = (stored.is_floating_point and here.is_floating_point) or (
        stored.is_complex and here.is_complex
    )
    if stored != here and not is_rounded:
        raise ValueError(
            f"{name} was saved in {stored} and is {here} in the model, which is left as it "
            "was: these are not the same numbers in another precision; load it into a model like "
            "the one that was saved"
        )


def names_of(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            names += names_of(value, f"{prefix}{key}.")
        else:
            names.append(literal(f"{prefix}{key}"))
    return names


def literal(name: str) -> str:
    """``name`` as a shell pattern that matches nothing else."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
