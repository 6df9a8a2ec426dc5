"""What programs assign to the gradient of an offloaded parameter, and the flag that it gets one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infinity.parameters.offloaded.gradient import GradientValues, OffloadedGradient
from infinity.parameters.offloaded.placeholders import is_placeholder
from swap.plain import memory_fault


def assigned(name: str, parameter: torch.Tensor, gradient: Any) -> torch.Tensor:
    """The gradient that a program assigns to ``parameter``, or a copy of it, with its history,
    where its values are elsewhere (weights that are offloaded) or a view of those of a gradient.

    Raises what it cannot be kept for: as torch does, but that it may lie on another device, and for
    what has no values.
    """
    subject = f"what was assigned to the gradient of {name}"
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"{subject} is a {type(gradient).__name__}; assign a tensor or None")
    if isinstance(gradient, OffloadedGradient):
        raise RuntimeError(
            f"{subject} is the gradient of {gradient.name_of_parameter} or was cleared, and would "
            "have to be both; assign a copy (clone())"
        )
    if gradient is parameter:
        raise RuntimeError(f"{subject} is the parameter itself; assign a copy")
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"{subject} is of shape {tuple(gradient.shape)}, the parameter of "
            f"{tuple(parameter.shape)}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        # Older releases of torch take gradients of no other dtype than the tensor's.
        wanted = getattr(parameter, "grad_dtype", parameter.dtype)
    if wanted is not None and gradient.dtype != wanted:
        raise ValueError(f"{subject} is {gradient.dtype}; convert it to {wanted}")
    if is_placeholder(gradient) or isinstance(gradient, GradientValues):
        return gradient.clone()
    fault = memory_fault(gradient) if gradient.layout == torch.strided else None
    if fault is not None:
        raise ValueError(f"{subject} {fault}; assign a tensor that has its values")
    return gradient


def when_flagged(parameter: torch.Tensor, call: Callable[[], object]) -> None:
    """``call`` as ``parameter``, which comes frozen, is flagged inside the block."""
    calls: list[Callable[[], object]] = vars(parameter).setdefault(_CALLS, [])
    calls.append(call)


def expect_gradients(parameter: Any) -> None:
    """From now on autograd may bring some to ``parameter``, which came frozen. Idempotent."""
    parameter.offload_owner.watch_gradients(parameter.offload_index)
    for call in vars(parameter).pop(_CALLS, ()):
        call()


_CALLS = "_calls_when_flagged"
