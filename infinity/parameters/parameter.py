"""The face of a parameter while its bytes are elsewhere.

A parameter keeps its identity, shape and dtype; only its data is swapped for a *placeholder*, one
element expanded to the shape with strides of zero. It has then the class ``AbsentParameter``: an
operation on it that is not about metadata has the weights fetched for as long as it runs. The
element is NaN where the dtype has one, so that a value read past all this is loud instead of
plausible.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from infinity.parameters.changes import Changes, wait_for, without_pointer, writes_later
from infinity.parameters.differentiated import PASSES, by_edges, is_by_inputs_alone
from infinity.parameters.gradient import METADATA, GradientOwner, OffloadedGradient, check_assigned

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class Owner(GradientOwner, Protocol):
    """Who knows the weights and gradients of offloaded parameters."""

    def has_gradient(self, index: int) -> bool:
        """Whether the parameter has one that was not cleared."""

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Replace or clear it."""

    def in_place(self, indices: Collection[int]) -> AbstractContextManager[None]:
        """Weights of these parameters are in place inside."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward pass of the model runs on this thread."""

    def is_gathered(self, index: int) -> bool:
        """Whether the parameter holds a tensor that is the program's to change."""


class OffloadedParameter(nn.Parameter):
    """Class that a parameter has inside the block. Its gradient is not a tensor of its own: see
    ``grad``.
    """

    is_offloaded = True
    offload_index: int
    offload_trainable: bool
    offload_owner: Owner

    @property
    def grad(self) -> torch.Tensor | None:
        """None, or what stands for the gradient and reads it when it is used, see ``gradient``.

        To a hook that was on the parameter before the block, it is what has just arrived.
        """
        arriving: torch.Tensor | None = _GRAD.__get__(self)
        if arriving is not None:
            return arriving
        if not self.offload_owner.has_gradient(self.offload_index):
            return None
        return OffloadedGradient.of(self.offload_owner, self.offload_index, self._face)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        own = self.offload_owner, self.offload_index
        if isinstance(gradient, OffloadedGradient) and gradient.stands_for(*own):
            return  # ``p.grad += x`` has changed it already
        if gradient is not None:
            self._check_trainable("cannot be given a gradient")
            check_assigned(self._name, self, gradient)
        is_arriving = _GRAD.__get__(self) is not None
        _GRAD.__set__(self, gradient if is_arriving else None)
        if not is_arriving or gradient is None:  # what arrives joins those that came before it
            self.offload_owner.set_gradient(self.offload_index, gradient)

    @property
    def data(self) -> torch.Tensor:
        """The weights, as ``detach()`` gives them: outside of forward passes a copy.

        Unlike that of other parameters it shares their version, so that a change made through it is
        noticed and does not get lost, unless torch does not count it: collectives change the copy.
        """
        return self.detach()

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        if not self.offload_owner.is_gathered(self.offload_index):
            raise RuntimeError(
                f"the data of {self._name}, which is offloaded, cannot be replaced; change its "
                "values inside `with offloaded.gathered([parameter], modify=True):`"
            )
        if data.shape != self.shape:
            raise RuntimeError(
                f"{self._name} has shape {tuple(self.shape)} while it is offloaded and cannot "
                f"become {tuple(data.shape)}; resize it (resize_token_embeddings does) before the "
                "block"
            )
        _DATA.__set__(self, data)
        # Unlike a change in place, this leaves the version as it is.
        torch.autograd.graph.increment_version(self)

    @property
    def _face(self) -> torch.Tensor:
        """Without memory, as the parameter is."""
        with torch._C.DisableTorchFunctionSubclass():
            return placeholder(self.shape, self.dtype, self.device)

    @property
    def _name(self) -> str:
        return self.offload_owner.name_of(self.offload_index)

    @property
    def requires_grad(self) -> bool:
        """As ever, but what came in frozen stays frozen: it has no optimizer state."""
        required: bool = _REQUIRES_GRAD.__get__(self)
        return required

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        if required:
            self._check_trainable("cannot be trained")
        _REQUIRES_GRAD.__set__(self, required)

    def requires_grad_(self, requires_grad: bool = True) -> OffloadedParameter:
        self.requires_grad = requires_grad
        return self

    def _check_trainable(self, refusal: str) -> None:
        if not self.offload_trainable:
            raise RuntimeError(
                f"{self._name} was frozen when it was offloaded, has no optimizer state and "
                f"{refusal}; call requires_grad_(True) before the block, and requires_grad_(False) "
                "inside it for as long as it is not to be trained"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied()


class AbsentParameter(OffloadedParameter):
    """Class that a parameter has while its weights are not in place, or are being updated there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PASSES and is_by_inputs_alone(func, args, kwargs, _is_absent):
            return by_edges(func, args, kwargs, _is_absent)
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__self__", None) in _ABOUT_METADATA or func in _ABOUT_METADATA:
                return func(*args, **kwargs)
            absent = [p for p in tree_leaves((args, kwargs)) if isinstance(p, AbsentParameter)]
            by_owner: dict[Owner, set[int]] = {}
            for parameter in absent:
                by_owner.setdefault(parameter.offload_owner, set()).add(parameter.offload_index)
            with ExitStack() as stack:
                for owner, indices in by_owner.items():
                    stack.enter_context(owner.in_place(indices))
                result = _unchanged(func, args, kwargs, absent)
                if any(owner.is_computing for owner in by_owner):
                    return result
                return _with_own_memory(result, absent)


def _unchanged(func: Any, args: Any, kwargs: Any, parameters: Sequence[AbsentParameter]) -> Any:
    """``func`` of weights that are in place. Raises ``RuntimeError`` if it changes one without
    counting it, as collectives do, and gives the weights the values that they had.
    """
    if writes_later(func):
        _refuse_change(func, parameters[0])
    changes = [Changes(func, parameter) for parameter in parameters]
    result = func(*args, **kwargs)
    wait_for(func, result)
    for parameter, change in zip(parameters, changes, strict=True):
        if not change.is_counted and change.are_there():
            change.undo()
            _refuse_change(func, parameter)
    return result


def _refuse_change(func: Any, parameter: AbsentParameter) -> None:
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} would change the weights of {parameter._name}, which "
        "is offloaded; change them inside `with offloaded.gathered([parameter], modify=True):`"
    )


def _is_absent(value: object) -> bool:
    return isinstance(value, AbsentParameter)


def _with_own_memory(result: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """``result`` with copies for tensors without history that lie in the weights of ``parameters``.

    The weights are updated in place where they are at home, and left behind where they are not: a
    view that a program keeps would follow the training or not, and hold memory that others need.
    A copy has the version of the parameter, as the view had: changes in it are noticed.
    """
    owners = {parameter.untyped_storage()._cdata: parameter for parameter in parameters}

    def own(leaf: Any) -> Any:
        if (
            not isinstance(leaf, torch.Tensor)
            or isinstance(leaf, OffloadedParameter)
            or leaf.layout != torch.strided
            or (leaf.requires_grad and torch.is_grad_enabled())
        ):
            return leaf
        parameter = owners.get(leaf.untyped_storage()._cdata)
        if parameter is None:
            return leaf
        with torch.inference_mode(False):
            copy = parameter.detach()
            copy.data = leaf.detach().clone()
        return copy

    return tree_map(own, result)


_ABOUT_METADATA = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *METADATA,
        *("grad", "grad_fn", "is_leaf", "is_meta", "itemsize", "nbytes", "output_nr"),
        *("retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("_version", "__len__", "dim", "element_size", "get_device", "is_complex"),
        *("is_floating_point", "is_inference", "numel", "size"),
        *("register_hook", "register_post_accumulate_grad_hook"),
        *(["grad_dtype"] if hasattr(torch.Tensor, "grad_dtype") else []),
    )
)


def put_data(parameter: OffloadedParameter, data: torch.Tensor, *, absent: bool) -> None:
    """Let ``parameter`` hold ``data``; ``absent`` if these are not its weights, or not yet.

    After an interrupt it has the old or the new ones, which must be asked for before the next use.
    """
    try:
        parameter.__class__ = OffloadedParameter
        with torch.inference_mode(False):
            _DATA.__set__(parameter, data)
        if absent:
            parameter.__class__ = AbsentParameter
    except BaseException:
        parameter.__class__ = AbsentParameter
        raise


def mark_absent(parameter: OffloadedParameter) -> None:
    """The weights are in place, but must be asked for before the next use."""
    parameter.__class__ = AbsentParameter


def become_offloaded(
    parameter: Any, index: int, owner: Owner, dtype: torch.dtype, device: torch.device
) -> None:
    """Give ``parameter`` its offloaded class and a placeholder; it stays the same object."""
    face = placeholder(parameter.shape, dtype, device)
    if parameter.is_meta:
        # A meta tensor cannot take real data; the object can take the place of one that does.
        try:
            _swap(parameter, _like(parameter, face))
        except RuntimeError as error:
            raise ValueError(
                f"{owner.name_of(index)} is on the meta device and something refers to it that "
                f"keeps it from getting real values ({error}); build the model on the CPU"
            ) from error
    else:
        parameter.data = face
    parameter.__class__ = OffloadedParameter
    parameter.offload_index = index
    parameter.offload_trainable = parameter.requires_grad
    parameter.offload_owner = owner


def become_plain(parameter: Any, kind: type[nn.Parameter], data: torch.Tensor) -> nn.Parameter:
    """Undo ``become_offloaded``; ``data`` is what the parameter holds from now on.

    Returns the parameter, or a new one in its place where one of the two is on meta and a graph
    that is still alive refers to the old one. After an interrupt it can be called again; the class
    changes last.
    """
    if data.is_meta != parameter.is_meta:
        fresh = _like(parameter, data)
        try:
            _swap(parameter, fresh)
        except RuntimeError:
            _let_hook(fresh, parameter)
            _forget_owner(fresh)
            return fresh
    elif not data.is_meta:
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            _DATA.__set__(parameter, data)
    _forget_owner(parameter)
    parameter.__class__ = kind
    return parameter  # type: ignore[no-any-return]


def _like(parameter: Any, data: torch.Tensor) -> nn.Parameter:
    """A parameter over ``data`` with the attributes that programs gave ``parameter``, but for its
    hooks.
    """
    fresh: Any = nn.Parameter(data, parameter.requires_grad)
    vars(fresh).update(vars(parameter))
    grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    if grad_dtype != parameter.dtype:
        fresh.grad_dtype = grad_dtype
    return fresh  # type: ignore[no-any-return]


def _swap(parameter: Any, fresh: nn.Parameter) -> None:
    torch.utils.swap_tensors(parameter, fresh)
    _let_hook(parameter, parameter)


def _let_hook(parameter: Any, hooked: Any) -> None:
    """Have the hooks on ``hooked`` called for ``parameter``. After a swap a parameter still lists
    its own, and autograd knows of none.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(hooked, name):
                setattr(parameter, name, hooks)


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What programs gave the parameter (``parameter.lr_scale = 0.1``)."""
    return {name: value for name, value in vars(parameter).items() if name not in _OF_OWNER}


_OF_OWNER = ("offload_index", "offload_trainable", "offload_owner")


def _forget_owner(parameter: torch.Tensor) -> None:
    for name in _OF_OWNER:
        vars(parameter).pop(name, None)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever a module of ``model`` has ``old``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def take_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd put on ``parameter``, which is taken off it."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of that shape that takes one element of memory."""
    has_nan = dtype.is_floating_point or dtype.is_complex
    value = torch.empty(1, dtype=dtype, device=device)
    if has_nan:
        value.fill_(float("nan"))
    else:
        value.zero_()
    return without_pointer(value.expand(shape) if len(shape) else value.reshape(()))


def cannot_be_copied() -> RuntimeError:
    """What ``copy.deepcopy`` and ``pickle`` of an offloaded model end in."""
    return RuntimeError(
        "an offloaded model cannot be copied or pickled; write it with offloaded.save(path) or "
        "offloaded.export(folder), or copy the values of its parameters"
    )
