"""The gradient of an offloaded parameter as programs see it, and what they may assign to it."""

from __future__ import annotations

from typing import Any

import torch

from swap.plain import memory_fault

METADATA = ("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "requires_grad", "ndim")


class OffloadedGradient(torch.Tensor):
    """Stands where a gradient would be. Has shape, dtype and device; anything else raises
    ``RuntimeError``.
    """

    @staticmethod
    def like(parameter: torch.Tensor) -> OffloadedGradient:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return empty.as_subclass(OffloadedGradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{name}: the gradient of an offloaded parameter is not a tensor in memory. To clip "
            "call offloaded.clip_grad_norm_(max_norm) or pass max_grad_norm to offload; for the "
            "norm read offloaded.grad_norm; to clear call offloaded.optimizer.zero_grad(); for "
            "values call offloaded.gradient(parameter); in place of torch.amp.GradScaler call "
            "offloaded.backward(loss), which scales the loss where compute_dtype is float16"
        )


_ALLOWED = tuple(getattr(torch.Tensor, name) for name in METADATA)


def check_assigned(name: str, parameter: torch.Tensor, gradient: Any) -> None:
    """Raise what a gradient that a program assigns to ``parameter`` cannot be kept for: as torch
    does, but that it may lie on another device, and for what has no values.
    """
    subject = f"what was assigned to the gradient of {name}"
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"{subject} is a {type(gradient).__name__}; assign a tensor or None")
    if isinstance(gradient, OffloadedGradient):
        raise RuntimeError(
            f"{subject} is what stands for a gradient that is not in memory; read the values with "
            "offloaded.gradient(parameter) and assign those"
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
    fault = memory_fault(gradient) if gradient.layout == torch.strided else None
    if fault is not None:
        raise ValueError(f"{subject} {fault}; assign a tensor that has its values")
