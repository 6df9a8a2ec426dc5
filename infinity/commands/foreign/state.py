"""What AdamW's state is called when it comes from another library, and what it must fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swap.storage.components import as_bytes

MOMENTS = ("exp_avg", "exp_avg_sq")
SHOWN = 5
"""Names that a message lists."""
NOT_OPTIONS = ("params", "param_names")
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of moments whose values float32 has, every one."""
_KEPT = {"step", *MOMENTS}
_ADAMW = {"lr", "betas", "eps", "weight_decay", "amsgrad"}


def check_kept(kept: Iterable[str], name: object, source: object) -> None:
    """Raises ``ValueError`` for the state of a parameter that is not that of AdamW."""
    has = {*kept}
    if has != _KEPT:
        raise ValueError(
            f"{source} keeps {', '.join(sorted(map(str, has)))} of {name}, which is not the state "
            f"of AdamW without amsgrad ({', '.join(sorted(_KEPT))})"
        )


def check_moments(
    kept: Mapping[str, Any], name: object, source: object, *dtypes: torch.dtype
) -> None:
    """Raises ``ValueError`` for moments that are no tensors of one of these dtypes, with values."""
    for part in MOMENTS:
        dtype = getattr(kept[part], "dtype", type(kept[part]).__name__)
        check_dtype(dtype, f"{part} of {name}", source, *dtypes)
        check_dense(kept[part], f"{part} of {name}", source)


def check_dense(tensor: torch.Tensor, what: str, source: object) -> None:
    """Raises ``ValueError`` for a tensor that has no values, or has them in no order of its own."""
    if tensor.is_meta:
        raise ValueError(f"{source} keeps {what} on the meta device, which has no values")
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else _told(tensor.layout)
        raise ValueError(f"{source} keeps {what} as a {layout} tensor; save it dense")


def check_dtype(dtype: object, what: str, source: object, *dtypes: torch.dtype) -> None:
    """Raises ``ValueError`` for what is kept in another dtype than one of these."""
    if dtype not in dtypes:
        raise ValueError(
            f"{source} keeps {what} in {_told(dtype)}, and not in {' or '.join(map(_told, dtypes))}"
        )


def step_count(kept: object, what: str, source: object) -> int:
    """Of steps, as a number or a tensor of one. Raises ``ValueError`` for what is none."""
    try:
        value = kept.item() if isinstance(kept, torch.Tensor) else kept
    except RuntimeError:  # of several, or of none
        value = kept
    if not isinstance(value, int | float) or not 0 <= value < 2**63 or value != int(value):
        raise ValueError(f"{source} has no number of steps as {what}, but {str(kept)[:80]}")
    return int(value)


def _told(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def check_options(group: Mapping[str, Any], source: object) -> None:
    """Raises ``ValueError`` for another optimizer that keeps what AdamW keeps, by its options."""
    if not group.keys() >= _ADAMW or group["amsgrad"] or "momentum_decay" in group:
        raise ValueError(
            f"{source} is not of AdamW without amsgrad: its options are "
            f"{', '.join(sorted(str(key) for key in group if key not in NOT_OPTIONS))}"
        )
    _check_decay(group, source)


def _check_decay(options: Mapping[str, Any], source: object) -> None:
    """Raises ``ValueError`` for the options of another optimizer that keeps the same."""
    if options.get("decoupled_weight_decay") is False and options.get("weight_decay"):
        raise ValueError(
            f"{source} is of an optimizer whose weight decay is part of the gradient, as that of "
            "Adam; infinity.AdamW decays weights apart from it, and would go on otherwise"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignState:
    """By the model's own names of its parameters; tensors may be sources that are read later.

    ``groups`` are those of the optimizer with its options and the names as ``params``; none where
    the files do not say, and then training goes on with the options that it is given.
    """

    moments: Mapping[str, tuple[Any, Any]]
    steps: Mapping[str, int]
    weights: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    is_grouped: bool = True
    """Whether the source says what was one group; else ``groups`` are of those with equal options.
    """
    buffers: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    """Whether ``weights`` should have every parameter: the source had frozen ones, too."""
    others: Sequence[str] = ()
    """Parameters that the source has and the model has not."""

    def check(self, model: nn.Module, source: object) -> None:
        """Raises ``ValueError`` listing all that does not fit, before anything is written."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        problems = list(self._problems(shapes))
        if problems:
            more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(
                f"{source} is not of this model: {'; '.join(problems[:SHOWN])}{more}; give the "
                "--model that it was trained with"
            )
        if not self.moments:
            raise ValueError(f"{source} has no exp_avg and exp_avg_sq of any parameter")

    def _problems(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        grouped = (name for group in self.groups for name in group["params"])
        told = dict.fromkeys((*self.others, *grouped, *self.moments, *self.weights))
        for name in told:
            if name not in shapes:
                yield f"the model has no parameter {name}"
        found = {
            name: {part: tuple(tensor.shape) for part, tensor in zip(MOMENTS, both, strict=True)}
            for name, both in self.moments.items()
        }
        for name, weight in self.weights.items():
            found.setdefault(name, {})["weight"] = tuple(weight.shape)
        for name, parts in found.items():
            for part, shape in parts.items():
                if shape != shapes.get(name, shape):
                    yield f"{part} of {name} has shape {list(shape)}, not {list(shapes[name])}"


class Float32:
    """A tensor of another dtype, as float32: a ``ByteSource`` that converts what is read."""

    thread_safe = True
    dtype = torch.float32

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self._flat = tensor.contiguous().view(-1)

    def read(self, start: int, out: memoryview) -> None:
        target = torch.frombuffer(out, dtype=torch.float32)
        target.copy_(self._flat[start // 4 : start // 4 + target.numel()])


def as_float32(tensor: torch.Tensor) -> Any:
    """What a checkpoint reads it from: the tensor itself where it is float32."""
    return tensor if tensor.dtype == torch.float32 else Float32(tensor)


class Shelf:
    """Tensors that ``read`` gives whole by their names: one at a time, the last one is kept."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last: tuple[str, torch.Tensor] | None = None

    def copy(self, name: str, dtype: torch.dtype, start: int, out: memoryview) -> None:
        """Bytes from ``start`` on of a tensor in ``dtype``."""
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # its memory goes before that of the next comes
                self._last = name, self._read(name).to(dtype).contiguous()
            out[:] = as_bytes(self._last[1].view(-1)).data[start : start + len(out)]


class Shelved:
    """One of them, as a ``ByteSource``."""

    thread_safe = True

    def __init__(self, shelf: Shelf, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shelf, self._name = shelf, name
        self.shape, self.dtype = tuple(shape), dtype

    def read(self, start: int, out: memoryview) -> None:
        self._shelf.copy(self._name, self.dtype, start, out)
