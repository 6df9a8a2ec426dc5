"""The state of an ``OffloadedAdamW`` out of its tiers and back: as tensors, and as checkpoints.

A checkpoint is the tree

    optimizer.<component>.<name>    lo or master, exp_avg, exp_avg_sq; shape of the local parameter
    infinity                        step counts, groups, and what the parameters were
    extra                           whatever the caller gave

with the dimensions of a parameter in the order in which they lie in memory. It is streamed: nothing
but the staging of the checkpoint is in memory. Parameters are not in it, they are the model's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

import checkpoint
from checkpoint.directory.locate import peek_saved
from checkpoint.transfer.memory import available_bytes
from infinity.adamw.local_tensors import flat, like, local, shape_in, unflat
from infinity.adamw.member import Held, Member
from infinity.adamw.tiers.store import StateStore
from infinity.optim.adamw import AdamRule
from infinity.values.component_bytes import values_at
from swap.plain import plain
from swap.tiers import format_bytes

KIND = "OffloadedAdamW"
FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RULE = AdamRule()
_MAX_LOADS = 20
"""Saves in a row that may each take the place of what is being loaded."""
T = TypeVar("T")


def component_dtypes(member: Member) -> dict[str, torch.dtype]:
    """Name and dtype of what is kept for a parameter."""
    return {component.name: component.dtype for component in _RULE.components(member.dtype)}


# As tensors.


def check_memory(members: Sequence[Member]) -> None:
    """Raises ``MemoryError`` when the state of ``members`` would not fit as tensors."""
    nbytes = sum(
        member.shape.numel() * sum(dtype.itemsize for dtype in component_dtypes(member).values())
        for member in members
        if member.held is not Held.NOTHING
    )
    available = available_bytes()
    if nbytes > available:
        raise MemoryError(
            f"the optimizer state takes {format_bytes(nbytes)} as tensors, and "
            f"{format_bytes(available)} of memory are free; call optimizer.save(path), which "
            "streams it"
        )


def tensors_of(member: Member, store: StateStore) -> dict[str, Any]:
    """The state of a parameter as tensors of its shape, on the CPU, and ``step``."""
    return {name: tensor_of(member, store, name) for name in ("step", *component_dtypes(member))}


def tensor_of(member: Member, store: StateStore, name: str) -> torch.Tensor:
    """One entry of the state of a parameter; zeros, and the weights as master, if it has none."""
    if name == "step":
        return torch.tensor(float(member.steps), dtype=torch.float32, device="cpu")
    values = _zeros(member, component_dtypes(member)[name])
    if member.held is Held.VALUES:
        store.read(member.number, name, 0, values)
    elif name == "master":
        values.copy_(member.weight())
    return like(unflat(values, member.layout, member.shape), member.parameter)


def _zeros(member: Member, dtype: torch.dtype) -> torch.Tensor:
    """Of a device that is named: modes of the program apply on threads that it made itself."""
    return torch.zeros(member.shape.numel(), dtype=dtype, device="cpu")


def check_tensors(member_name: str, shape: torch.Size, state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` when ``state`` is not that of AdamW for a parameter of ``shape``."""
    whose = f"the state of parameter {member_name}"
    if not isinstance(state, Mapping):
        raise ValueError(f"{whose} is a {type(state).__name__}, not a dict of tensors")
    for name in ("step", *_MOMENTS):
        if name not in state:
            raise ValueError(f"{whose} has no {name}")
    step_of(member_name, state["step"])
    for name, value in state.items():
        if name == "step":
            continue
        if name not in (*_MOMENTS, "lo", "master"):
            raise ValueError(
                f"{whose} has {name}, which OffloadedAdamW does not keep (it has no amsgrad)"
            )
        _check_values(f"{name} of parameter {member_name}", value, shape, is_bits=name == "lo")


def check_owners(state: Iterable[Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ValueError`` where a state dict has ``state``, by key, of what none of its groups
    has: it would be left out, all of it where the keys are of another kind (text in JSON).
    """
    strangers = {*state}.difference(*(group["params"] for group in groups))
    if strangers:
        names = sorted(
            f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            for key in strangers
        )
        more = f" and {len(names) - 5} others" if len(names) > 5 else ""
        raise ValueError(
            f"the state dict has state of {', '.join(names[:5])}{more}, which no parameter group "
            "of it has: it cannot be said whose it is; give it the keys that the groups have in "
            "'params'"
        )


def step_of(member_name: str, value: Any) -> int:
    """The count of steps in a state. Raises ``ValueError`` for what is none."""
    try:
        step = float(local(value) if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"step of parameter {member_name} is no number: {error}") from error
    if not (step >= 0 and step.is_integer()):
        raise ValueError(f"step of parameter {member_name} is {step}, not a count")
    return int(step)


def _check_values(what: str, value: Any, shape: torch.Size, *, is_bits: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} is a {type(value).__name__}, not a tensor")
    tensor = local(value)
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device, and has no values")
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} is {tensor.layout}; make it dense with .to_dense()")
    if tensor.is_complex() or tensor.is_floating_point() == is_bits:
        raise ValueError(f"{what} is {tensor.dtype}; {'int16' if is_bits else 'float32'} is kept")
    if tensor.shape != shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, the parameter has {tuple(shape)} on this rank"
        )


def take_tensors(member: Member, store: StateStore, state: Mapping[str, Any]) -> None:
    """Set the state of a parameter from tensors, converting them. Raises ``AioError``.

    A master that is there is kept whatever the weights are now, which may be loaded later: the next
    step has it follow them. One that is not there is made of the weights.
    """
    for name, dtype in component_dtypes(member).items():
        if name in state:
            values = flat(plain(local(state[name])), member.layout).to("cpu", dtype)
        else:
            values = _zeros(member, dtype)
        if name == "master" and name not in state:
            values.copy_(member.weight())
        store.write(member.number, name, 0, values.contiguous())
    member.steps = step_of(member.name, state["step"])
    member.held = Held.VALUES


# As checkpoints.


@dataclass(frozen=True, slots=True)
class StateBytes:
    """One component of one parameter: a ``checkpoint.ByteSource`` and ``ByteSink``."""

    store: StateStore
    number: int
    component: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True
    """Transfers are at offsets, and stripes want several of them at once."""

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``; whole elements. Raises ``AioError``."""
        self.store.read(self.number, self.component, *values_at(start, out, self.dtype))

    def write(self, start: int, data: memoryview) -> None:
        """Take ``data`` as the bytes from byte ``start``; whole elements. Raises ``AioError``."""
        self.store.write(self.number, self.component, *values_at(start, data, self.dtype))


def save(
    path: str | os.PathLike[str],
    members: Mapping[str, Member],
    store: StateStore,
    groups: list[dict[str, Any]],
    extra: Any,
) -> Any:
    """Write a checkpoint of a flushed store. ``groups`` have the names of ``members``."""
    stepped = {name: member for name, member in members.items() if member.held is Held.VALUES}
    state = {
        "optimizer": _leaves(stepped, store),
        "infinity": {
            "kind": KIND,
            "format": FORMAT,
            "groups": groups,
            "parameters": {name: _described(member) for name, member in stepped.items()},
        },
        "extra": {"value": extra},
    }
    return checkpoint.save(state, path, staging_bytes=store.checkpoint_bytes)


def read_header(path: str | os.PathLike[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint holds beside the state. Raises ``ValueError`` for one of other groups."""
    foreign = f"{path} was not saved by an OffloadedAdamW"
    try:
        header: Any = checkpoint.load(path, only=["infinity.*"])["infinity"]
    except checkpoint.CorruptCheckpointError:
        raise
    except ValueError as error:
        raise ValueError(foreign) from error
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ValueError(foreign)
    if header["format"] != FORMAT:
        raise ValueError(f"{path} has format {header['format']}; this version reads {FORMAT}")
    theirs, ours = ([group["params"] for group in all_] for all_ in (header["groups"], groups))
    if theirs != ours:
        raise ValueError(
            f"{path} has parameter groups of {[len(names) for names in theirs]} parameters, the "
            f"optimizer of {[len(names) for names in ours]}, or their names differ"
        )
    strangers = set(header["parameters"]).difference(*theirs)
    if strangers:
        raise ValueError(
            f"{path} has state of {', '.join(sorted(strangers))}, which no parameter group of then "
            "has: it cannot be said whose it is"
        )
    return header


def of_one_save(path: str | os.PathLike[str], load: Callable[[], T]) -> T:
    """What ``load`` gives, which reads ``path`` several times: again, where somebody saved over it
    meanwhile. Raises ``BlockingIOError`` where that happens each time, and what ``load`` does.
    """
    for _ in range(_MAX_LOADS):
        before = peek_saved(Path(path))
        loaded = load()
        if peek_saved(Path(path)) == before:
            return loaded
    raise BlockingIOError(
        errno.EAGAIN, f"was saved over {_MAX_LOADS} times before it could be loaded", str(path)
    )


def check_described(
    path: str | os.PathLike[str],
    members: Mapping[str, Member],
    parameters: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raises ``ValueError`` naming a parameter at ``path`` that is another one here."""
    for name, described in parameters.items():
        ours = _described(members[name])
        for key in ("shape", "layout", "dtype"):
            if described[key] != ours[key]:
                raise ValueError(
                    f"{key} of parameter {name} is {described[key]} in {path}, {ours[key]} here"
                )


def load(
    path: str | os.PathLike[str],
    members: Mapping[str, Member],
    store: StateStore,
    parameters: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Read into a flushed store what ``save`` wrote of ``parameters``; returns ``extra``."""
    leaves = _leaves({name: members[name] for name in parameters}, store)
    if leaves:
        checkpoint.load(path, into={"optimizer": leaves}, staging_bytes=store.checkpoint_bytes)
    return checkpoint.load(path, only=["extra.*"])["extra"]["value"]


def _leaves(members: Mapping[str, Member], store: StateStore) -> dict[str, dict[str, StateBytes]]:
    leaves: dict[str, dict[str, StateBytes]] = {}
    for name, member in members.items():
        shape = shape_in(member.layout, member.shape)
        for component, dtype in component_dtypes(member).items():
            leaf = StateBytes(store, member.number, component, dtype, shape)
            leaves.setdefault(component, {})[name] = leaf
    return leaves


def _described(member: Member) -> dict[str, Any]:
    return {
        "steps": member.steps,
        "shape": list(member.shape),
        "layout": list(member.layout),
        "dtype": member.dtype,
    }
