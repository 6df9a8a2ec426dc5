"""The face of a parameter while its bytes are elsewhere.

A parameter keeps its identity, shape and dtype; only its data is swapped for a *placeholder*, one
element expanded to the shape with strides of zero. The element is NaN where the dtype has one, so
that a value read past the library's back is loud instead of plausible.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

_GRAD: Any = torch.Tensor.grad
_METADATA = ("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "requires_grad", "ndim")


class Gradients(Protocol):
    """Who knows the gradients of offloaded parameters."""

    def has_gradient(self, index: int) -> bool:
        """Whether the parameter has one that was not cleared."""

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Replace or clear it."""


class OffloadedParameter(nn.Parameter):
    """Class that a parameter has inside the block. Its gradient is not a tensor of its own: see
    ``grad``.
    """

    is_offloaded = True
    offload_index: int
    offload_gradients: Gradients

    @property
    def grad(self) -> torch.Tensor | None:
        """None, or a stand-in: not None, clearable by ``p.grad = None``, and an error naming the
        remedy if read.
        """
        if not self.offload_gradients.has_gradient(self.offload_index):
            return None
        return OffloadedGradient.like(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.offload_gradients.set_gradient(self.offload_index, gradient)


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
            "values call offloaded.gradient(parameter)"
        )


_ALLOWED = tuple(getattr(torch.Tensor, name) for name in _METADATA)


def become_offloaded(
    parameter: Any, index: int, gradients: Gradients, dtype: torch.dtype, device: torch.device
) -> None:
    """Give ``parameter`` its offloaded class and a placeholder; it stays the same object."""
    face = placeholder(parameter.shape, dtype, device)
    if parameter.is_meta:
        # A meta tensor cannot take real data; the object can take the place of one that does.
        torch.utils.swap_tensors(parameter, nn.Parameter(face, parameter.requires_grad))
    else:
        parameter.data = face
    parameter.__class__ = OffloadedParameter
    parameter.offload_index = index
    parameter.offload_gradients = gradients


def become_plain(parameter: Any, kind: type[nn.Parameter], data: torch.Tensor) -> nn.Parameter:
    """Undo ``become_offloaded``; ``data`` is what the parameter holds from now on.

    Returns the parameter, or a new one in its place where ``data`` is on meta and a graph that is
    still alive refers to the old one.
    """
    parameter.__class__ = kind
    del parameter.offload_index, parameter.offload_gradients
    if not data.is_meta:
        parameter.data = data
        return parameter  # type: ignore[no-any-return]
    fresh = nn.Parameter(data, parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, fresh)
    except RuntimeError:
        return fresh
    return parameter  # type: ignore[no-any-return]


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever a module of ``model`` has ``old``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd put on ``parameter``, which is taken off it."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return gradient


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of that shape that takes one element of memory."""
    has_nan = dtype.is_floating_point or dtype.is_complex
    value = torch.empty(1, dtype=dtype, device=device)
    if has_nan:
        value.copy_(torch.full((1,), float("nan")))
    else:
        value.zero_()
    return value.expand(shape) if len(shape) else value.reshape(())
