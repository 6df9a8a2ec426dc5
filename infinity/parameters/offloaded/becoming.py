"""A parameter becomes an offloaded one, and a plain one again: the same object, where torch lets it
be.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.parameters.offloaded.modes import outside_inference, without_history
from infinity.parameters.offloaded.parameter import AbsentParameter, OffloadedParameter, Owner
from infinity.parameters.offloaded.placeholders import (
    as_they_are,
    is_lost,
    placeholder,
    refusal_of_weights,
    refuse,
)

_DATA: Any = torch.Tensor.data


def become_offloaded(
    parameter: Any, index: int, owner: Owner, dtype: torch.dtype, device: torch.device
) -> None:
    """Give ``parameter`` its offloaded class and a placeholder; it stays the same object."""
    refusal = refusal_of_weights(owner.name_of(index))
    face = placeholder(parameter.shape, dtype, device, refusal)
    if parameter.is_meta:
        # A meta tensor cannot take real data; the object can take the place of one that does.
        try:
            with as_they_are():
                _swap(parameter, _like(parameter, face))
        except RuntimeError as error:
            raise ValueError(
                f"{owner.name_of(index)} is on the meta device and something refers to it that "
                f"keeps it from getting real values ({error}); build the model on the CPU"
            ) from error
    else:
        parameter.data = face
        _let_be_hooked(parameter)
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
        with as_they_are():
            fresh = _like(parameter, data)
        try:
            with as_they_are():
                _swap(parameter, fresh)
        except RuntimeError:
            _let_hook(fresh, parameter)
            _forget_owner(fresh)
            _let_refuse_pickling(fresh)
            return fresh
    elif not data.is_meta:
        with torch._C.DisableTorchFunctionSubclass(), outside_inference():
            _DATA.__set__(parameter, data)
    forget_hooks(parameter)
    _forget_owner(parameter)
    _let_refuse_pickling(parameter)
    parameter.__class__ = kind
    return parameter  # type: ignore[no-any-return]


def is_ours(parameter: torch.Tensor) -> bool:
    """Whether it became an offloaded one, and is: also while compiled code has it with the class
    that it came with. What it was swapped for is not.
    """
    return "offload_owner" in vars(parameter)


def ours(parameter: Any, name: str) -> OffloadedParameter:
    """``parameter``. Raises ``RuntimeError`` if it is not, or not any more, an offloaded one."""
    if not is_ours(parameter):
        raise RuntimeError(
            f"{name} was swapped for another tensor while it was offloaded (by "
            "torch.utils.swap_tensors), and what it got is lost; change its values inside `with "
            "offloaded.gathered([parameter], modify=True):`"
        )
    found: OffloadedParameter = parameter
    return found


def hooked(passed: Any) -> torch.Tensor:
    """The parameter that autograd has ``passed`` to a hook for accumulated gradients. Raises
    ``RuntimeError`` where it is what the hook before has returned, which torch refuses after all.
    """
    if not isinstance(passed, nn.Parameter):
        raise RuntimeError(
            "a hook that register_post_accumulate_grad_hook has put on a parameter before the "
            f"offload block returned a {type(passed).__name__}, where torch takes None alone; let "
            "it return nothing (lambdas return what they compute)"
        )
    return passed


def uncover(parameter: Any, kind: type[nn.Parameter]) -> None:
    """Let an offloaded parameter, whose weights are in place, have the class that it came with."""
    parameter.__class__ = kind


def cover(parameter: Any, *, absent: bool) -> None:
    """Undo that; ``absent`` if its weights are to be asked for before the next use. Idempotent."""
    if is_ours(parameter):
        parameter.__class__ = AbsentParameter if absent else OffloadedParameter


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
    """Have the hooks on ``hooked`` called for ``parameter``, and those that are added to
    them. After a swap a parameter still lists its own, and autograd knows of no such list.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for name in _HOOKS:
            hooks = getattr(hooked, name)
            if hooks or (hooks is not None and parameter is hooked):
                setattr(parameter, name, hooks)


def _let_be_hooked(parameter: Any) -> None:
    """Have the hook called that gradients leave by, also where a program has swapped the parameter
    since an earlier block (``load_state_dict`` and ``to`` do, if torch is told so). With hooks of
    its own in the list they are as torch left them, which may be uncalled, and so is ours.
    """
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and not hooks:
        parameter._post_accumulate_grad_hooks = hooks


def forget_hooks(parameter: Any) -> None:
    """Drop lists that no hook is in any more. What a program adds to such a list after a swap is
    never called, as autograd knows of none; where there is no list, torch makes one that it knows.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for name in _HOOKS:
            hooks = getattr(parameter, name)
            if hooks is not None and not hooks:
                setattr(parameter, name, None)


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What programs gave the parameter (``parameter.lr_scale = 0.1``)."""
    return {name: value for name, value in vars(parameter).items() if name not in _OF_OWNER}


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_STATE = "__getstate__"
_OF_OWNER = ("offload_index", "offload_trainable", "offload_owner", _STATE)


def _forget_owner(parameter: torch.Tensor) -> None:
    for name in _OF_OWNER:
        vars(parameter).pop(name, None)


def _let_refuse_pickling(parameter: torch.Tensor) -> None:
    """Where it has lost its values: what torch would write of it comes back as a tensor on meta
    like any other.
    """
    if is_lost(parameter):
        vars(parameter)[_STATE] = partial(refuse, parameter.data)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever a module of ``model`` has ``old``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


@without_history
def overwrite_data(parameter: OffloadedParameter, data: torch.Tensor) -> torch.Tensor:
    """Let the memory that ``parameter`` holds have the values of ``data``, which are its weights.
    Returns that memory.
    """
    with torch._C.DisableTorchFunctionSubclass():
        memory: torch.Tensor = _DATA.__get__(parameter)  # with a version of its own
        if memory.data_ptr() != data.data_ptr():
            memory.copy_(data)
    parameter.__class__ = OffloadedParameter
    return memory
