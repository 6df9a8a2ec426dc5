"""One step of Adam as its kernels take it: tensors checked, and numbers rounded as they use them.

Each implementation of the step, in C for the CPU and for devices in ``swap/device``, computes from
the same ``struct swap_adam``. So none of them rounds an option in a way of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from swap._native import ffi, lib
from swap.plain import check_array

if TYPE_CHECKING:
    from cffi import FFI

AdamJob: TypeAlias = Any
"""A pointer of cffi to a ``struct swap_adam``, whose fields can be read."""

MOMENT_BLOCK = lib.SWAP_MOMENT_BLOCK
"""Elements that share a scale where moments are kept in 8 bits."""

FLOATS = {
    torch.float32: lib.SWAP_F32,
    torch.bfloat16: lib.SWAP_BF16,
    torch.float16: lib.SWAP_F16,
}
_MOMENTS = {
    torch.float32: lib.SWAP_MOMENTS_F32,
    torch.bfloat16: lib.SWAP_MOMENTS_BF16,
    torch.uint8: lib.SWAP_MOMENTS_U8,
}
_LAYOUTS = {
    (torch.bfloat16, torch.int16): lib.SWAP_HALVES,
    (torch.bfloat16, torch.float32): lib.SWAP_COPY_BF16,
    (torch.float16, torch.float32): lib.SWAP_COPY_F16,
    (torch.float32, None): lib.SWAP_MASTER_ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamHyper:
    """What one Adam step depends on besides its tensors.

    ``step`` is the number of this step and counts from 1. ``grad_scale`` multiplies every gradient
    before it is used: the inverse of a loss scale, times the clipping coefficient. ``decoupled`` is
    the weight decay of AdamW; without it the decay is added to the gradient, as in Adam.

    Raises ValueError for a value out of range.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ValueError(f"{name}={value} must be 0 or more")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value} must be in [0, 1)")
        if self.step < 1:
            raise ValueError(f"step={self.step} must be 1 or more; the first step is number 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which elements a call is about: from element ``first`` of ``parameter``, a number for it.

    Moments of fewer than 32 bits are rounded by random bits that are a function of this and of
    the step alone.
    """

    parameter: int
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamTensors:
    """The arrays of a step, flat and of one length; see ``kernels.adam_step`` for their dtypes."""

    weight: torch.Tensor
    rest: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None


def adam_job(
    tensors: AdamTensors, hyper: AdamHyper, origin: Origin | None, *, device_type: str = "cpu"
) -> AdamJob:
    """The ``struct swap_adam`` of a step over ``tensors``, which it does not keep alive.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    layout = _layout(tensors)
    _check(tensors, device_type)
    return ffi.new(
        "struct swap_adam *",
        {
            **_addresses(tensors),
            "moments": _MOMENTS[tensors.exp_avg.dtype],
            "grad": address(tensors.grad),
            "n": tensors.weight.numel(),
            "layout": layout,
            "grad_float": FLOATS[tensors.grad.dtype],
            **_scalars(hyper),
            **_counter(tensors.exp_avg.dtype, hyper.step, origin),
        },
    )


def old_arrays(old: AdamTensors, new: AdamTensors) -> AdamJob:
    """A ``struct swap_adam`` with the arrays of ``old`` alone, that ``new`` ones are made from.

    Raises TypeError and ValueError for one that is not like the one that is made from it.
    """
    for name, _ in _STATE:
        before, after = getattr(old, name), getattr(new, name)
        if (before is None) != (after is None):
            raise TypeError(
                f"{name} is {'missing' if before is None else 'given'} in old, and not in the "
                "other arrays; pass those that are like them"
            )
        if after is not None:
            check_array(f"{name} of old", before, after.numel(), after.dtype)
    return ffi.new("struct swap_adam *", _addresses(old))


_STATE = (
    ("weight", "void *"),
    ("rest", "void *"),
    ("exp_avg", "void *"),
    ("exp_avg_sq", "void *"),
    ("exp_avg_scale", "float *"),
    ("exp_avg_sq_scale", "float *"),
)
"""The arrays that a step changes, and what they are in C."""


def _addresses(tensors: AdamTensors) -> dict[str, FFI.CData]:
    given = ((name, kind, getattr(tensors, name)) for name, kind in _STATE)
    return {
        name: ffi.NULL if tensor is None else ffi.cast(kind, tensor.data_ptr())
        for name, kind, tensor in given
    }


def address(tensor: torch.Tensor) -> FFI.CData:
    """Where its first element is, for C."""
    return ffi.cast("void *", tensor.data_ptr())


def _layout(tensors: AdamTensors) -> int:
    """How the weights are kept, which their dtypes say."""
    weight, rest = tensors.weight.dtype, None if tensors.rest is None else tensors.rest.dtype
    layout = _LAYOUTS.get((weight, rest))
    if layout is None:
        raise TypeError(
            f"weight is {weight} and rest {rest}; pass torch.bfloat16 with torch.int16,"
            " torch.bfloat16 or torch.float16 with torch.float32, or torch.float32 with None"
        )
    return layout


def _check(tensors: AdamTensors, device_type: str) -> None:
    """Raise for an array that does not fit ``weight``, the length of which is that of the step."""

    def check(name: str, tensor: torch.Tensor, n: int, *dtypes: torch.dtype) -> None:
        check_array(name, tensor, n, *dtypes, device_type=device_type)

    weight, rest = tensors.weight, tensors.rest
    n = weight.numel()
    check("weight", weight, n, weight.dtype)
    if rest is not None:
        check("rest", rest, n, rest.dtype)
    check("exp_avg", tensors.exp_avg, n, *_MOMENTS)
    check("exp_avg_sq", tensors.exp_avg_sq, n, tensors.exp_avg.dtype)
    check("grad", tensors.grad, n, *FLOATS)
    dtype = tensors.exp_avg.dtype
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        scale = getattr(tensors, name)
        if (scale is not None) != (dtype == torch.uint8):
            raise TypeError(
                f"{name} is {'missing' if scale is None else 'given'} and exp_avg {dtype}; pass "
                "scales with torch.uint8, and only then"
            )
        if scale is not None:
            check(name, scale, -(-n // MOMENT_BLOCK), torch.float32)


def _counter(dtype: torch.dtype, step: int, origin: Origin | None) -> dict[str, int]:
    """What random bits are a function of, in the kernel's terms."""
    if dtype == torch.float32:
        return {"parameter": 0, "step": step, "first": 0}
    if origin is None:
        raise TypeError(f"exp_avg is {dtype}; pass origin=, by which it is rounded")
    if origin.parameter < 0 or origin.first < 0:
        raise ValueError(f"{origin} must not be negative")
    if dtype == torch.uint8 and origin.first % MOMENT_BLOCK:
        raise ValueError(
            f"first={origin.first} is not a multiple of {MOMENT_BLOCK}, the elements of a block"
        )
    return {"parameter": origin.parameter, "step": step, "first": origin.first}


def _scalars(hyper: AdamHyper) -> dict[str, float]:
    """What the kernel's formulas take, computed in double as torch does and rounded to float."""
    # Without decay nothing may be added to the gradient: 0 times an infinite weight is NaN.
    in_gradient = not hyper.decoupled and hyper.weight_decay != 0.0
    on_weight = 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
    return {
        "decay_mode": lib.SWAP_DECAY_GRADIENT if in_gradient else lib.SWAP_DECAY_WEIGHT,
        "decay": hyper.weight_decay if in_gradient else on_weight,
        "grad_scale": hyper.grad_scale,
        "one_minus_beta1": 1.0 - hyper.beta1,
        "beta2": hyper.beta2,
        "one_minus_beta2": 1.0 - hyper.beta2,
        "bias2_sqrt": math.sqrt(1.0 - hyper.beta2**hyper.step),
        "eps": hyper.eps,
        "minus_step_size": -hyper.lr / (1.0 - hyper.beta1**hyper.step),
    }
