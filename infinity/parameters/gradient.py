"""The gradient of an offloaded parameter as programs see it, and what they may assign to it.

It is a tensor like any other to look at. Each operation on it reads the values, the gradients of
one parameter at a time, and what an operation changed in place is kept. So what programs and
frameworks do with gradients (clipping, norms, ``GradScaler``) is done as to tensors in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from swap.plain import memory_fault

METADATA = ("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "requires_grad", "ndim")


class GradientOwner(Protocol):
    """Who keeps gradients."""

    def gradient_values(self, index: int, age: int) -> torch.Tensor:
        """A copy on the compute device. Raises ``RuntimeError`` where it cannot be had, or has
        been cleared since it had that ``age``.
        """

    def gradient_age(self, index: int) -> int:
        """How often it was cleared or replaced."""

    def keep_gradient(self, index: int, values: torch.Tensor) -> None:
        """Let the gradient have these values."""

    def name_of(self, index: int) -> str:
        """What the model calls the parameter."""


class OffloadedGradient(torch.Tensor):
    """Stands for a gradient: what is done to it is done to the values, wherever they are."""

    _owner: GradientOwner
    _index: int
    _age: int

    @staticmethod
    def of(owner: GradientOwner, index: int, face: torch.Tensor) -> OffloadedGradient:
        """The gradient of a parameter; ``face`` has its shape, dtype and device."""
        gradient = face.as_subclass(OffloadedGradient)
        gradient._owner, gradient._index = owner, index
        gradient._age = owner.gradient_age(index)
        return gradient

    def stands_for(self, owner: GradientOwner, index: int) -> bool:
        """Whether this is the gradient that the parameter has now."""
        same = self._owner is owner and self._index == index
        return same and self._age == owner.gradient_age(index)

    def read(self) -> torch.Tensor:
        """The values, a copy whose changes are counted."""
        return self._owner.gradient_values(self._index, self._age)

    def keep(self, values: torch.Tensor) -> None:
        """What ``read`` gave was changed."""
        self._owner.keep_gradient(self._index, values)

    @property
    def name_of_parameter(self) -> str:
        return self._owner.name_of(self._index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", str(func))
            if func in _ALLOWED or (name == "__get__" and func.__self__ in _ALLOWED):
                return func(*args, **kwargs)
            if name == "detach_" or (name == "requires_grad_" and not all(args[1:])):
                return args[0]
            if name in _REFUSED:
                _refuse(name, next(_gradients_in((args, kwargs))).name_of_parameter)
            if name in ("__set__", "__delete__") and func != _SET_DATA:
                _refuse(name, next(_gradients_in((args, kwargs))).name_of_parameter)
            if name in ("mul_", "_foreach_mul_", "div_") and _is_one(args[1:]):
                return args[0]  # clipping that does not set in
            if name.startswith(("_foreach_", "_amp_foreach_")):
                return _one_by_one(func, args, kwargs)
            return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What came here by another way (collectives do) would work on what has no values."""
        gradient = next(_gradients_in((args, kwargs or {})))
        _refuse(str(func), gradient.name_of_parameter)


class GradientValues(torch.Tensor):
    """A view of a copy of a gradient, to be read only: a change in it would reach nothing."""

    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            views = [x for x in tree_leaves((args, kwargs)) if isinstance(x, GradientValues)]
            before = [view._version for view in views]
            name = getattr(func, "__name__", str(func))
            if name in _REFUSED or name in ("__set__", "__delete__"):
                _refuse(name, views[0]._name)
            result = func(*args, **kwargs)
            for view, version in zip(views, before, strict=True):
                if view._version != version or (_is_in_place(func) and view is args[0]):
                    raise RuntimeError(
                        f"{name} changed a view of the gradient of {view._name}, which is a copy: "
                        "the gradient itself is as it was; change the whole of it in place, or "
                        "assign to the parameter's grad"
                    )
            owners = {view.untyped_storage()._cdata: view._name for view in views}
            return tree_map(lambda leaf: _read_only(leaf, owners), result)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of the values in the place of the gradients; what it changed of them is kept."""
    found = {id(gradient): gradient for gradient in _gradients_in((args, kwargs))}
    values = {key: gradient.read() for key, gradient in found.items()}
    before = {key: tensor._version for key, tensor in values.items()}
    target = set(map(id, tree_leaves(args[:1]))) if _is_in_place(func) else set()
    args, kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
    result = func(*args, **kwargs)
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        target = set(found)  # collectives count no changes
        if hasattr(result, "wait"):
            result.wait()
    for key, gradient in found.items():
        if values[key]._version != before[key] or key in target:
            gradient.keep(values[key])
    return _as_seen(func, result, found, values)


def _is_in_place(func: Any) -> bool:
    """By its name: not all operations on lists count the changes that they make."""
    name = getattr(func, "__name__", "")
    return func == _SET_DATA or bool(name.endswith("_") and not name.endswith("__"))


def _as_seen(
    func: Any,
    result: Any,
    found: Mapping[int, OffloadedGradient],
    values: Mapping[int, torch.Tensor],
) -> Any:
    """``result`` with the gradients in the place of their values, and views of these read only."""
    by_values = {id(tensor): found[key] for key, tensor in values.items()}
    if func in _SAME and len(found) == 1:
        return next(iter(found.values()))
    owners = {
        tensor.untyped_storage()._cdata: found[key].name_of_parameter
        for key, tensor in values.items()
    }

    def seen(leaf: Any) -> Any:
        return by_values[id(leaf)] if id(leaf) in by_values else _read_only(leaf, owners)

    return tree_map(seen, result)


def _read_only(leaf: Any, owners: Mapping[Any, str]) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
        return leaf
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    name = owners.get(leaf.untyped_storage()._cdata)
    if name is None or (leaf.requires_grad and leaf.grad_fn is not None):
        return leaf
    view = leaf.as_subclass(GradientValues)
    view._name = name
    return view


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on lists, one element after the other: one gradient is in memory at a time."""
    count = len(args[0])
    results = []
    for position in range(count):
        own = [
            [arg[position]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg
            for arg in args
        ]
        results.append(_on_values(func, own, kwargs))
    if all(result is None for result in results):
        return None
    return tuple(element for result in results for element in result)


def _gradients_in(tree: Any) -> Any:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, OffloadedGradient))


def _is_one(factors: Sequence[Any]) -> bool:
    if len(factors) != 1:
        return False
    factor = factors[0]
    if isinstance(factor, torch.Tensor):
        is_scalar = not isinstance(factor, OffloadedGradient) and factor.dim() == 0
        return is_scalar and not factor.requires_grad and factor.item() == 1.0
    return isinstance(factor, float | int) and factor == 1.0


def _refuse(name: str, parameter: str) -> None:
    raise RuntimeError(
        f"{name}: the gradient of {parameter}, which is offloaded, is not a tensor in memory; take "
        "its values with offloaded.gradient(parameter), change them in place as a whole, or assign "
        "to the parameter's grad"
    )


_ALLOWED = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *METADATA,
        *("is_meta", "is_leaf", "itemsize", "nbytes", "grad", "grad_fn", "is_quantized"),
        *("__len__", "dim", "size", "numel", "element_size", "get_device", "ndimension"),
        *("is_floating_point", "is_complex", "is_inference"),
    )
)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME = frozenset((torch.Tensor.detach, torch.Tensor.data.__get__, torch.detach))  # type: ignore[attr-defined]
_REFUSED = frozenset(
    (
        *("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_"),
        *("resize_", "resize_as_", "requires_grad_", "register_hook", "backward", "retain_grad"),
        *("__dlpack__", "__cuda_array_interface__", "register_post_accumulate_grad_hook"),
    )
)


def check_assigned(name: str, parameter: torch.Tensor, gradient: Any) -> None:
    """Raise what a gradient that a program assigns to ``parameter`` cannot be kept for: as torch
    does, but that it may lie on another device, and for what has no values.
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
    fault = memory_fault(gradient) if gradient.layout == torch.strided else None
    if fault is not None:
        raise ValueError(f"{subject} {fault}; assign a tensor that has its values")
