"""What lies in a tensor whose values are elsewhere: one element, expanded to the shape with strides
of zero, that no operator is run on.

The tensor has a dispatch key of its own, ``_KEY``, and what has that key is passed to Python by
torch's dispatcher before any kernel sees it, whatever called: C++ that copies a tensor, ``vmap``,
TorchScript, the backward pass. Where it is an offloaded parameter its weights are put in place; a
tensor that was given the data of one is read as a copy of it, and cannot be written to, see
``parameter``. A tensor loses the key with its data, so one that holds values pays for none of this.

Whose values are missing, and how to get at them, is written in the memory behind the element.
Pointers to it are refused, and the element is NaN where the dtype has one, should something still
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import finalize

import torch
from torch.utils._pytree import tree_leaves

from infinity.parameters.offloaded.modes import own_modes

_functorch: Any = torch._C._functorch
_NAME = "TESTING_ONLY_GenericWrapper"
"""A key that torch gives to no tensor by itself, and that has no kernels."""
_KEY: Any = torch._C._dispatch_key_parse(_NAME)
_KEYS: Any = torch._C.DispatchKeySet(_KEY)
_TEXT_FROM = 16
"""Bytes before the text in the memory: as many as the largest element has."""
_libraries: list[Any] = []
"""Registrations end with these."""

_lenders: dict[int, torch.Tensor] = {}
"""By the storage of a placeholder, while the model is offloaded."""


class _Loss(NamedTuple):
    """Of a tensor on the meta device: why it has no values, and where they were."""

    refusal: str
    device: torch.device


_losses: dict[int, _Loss] = {}
"""By the storage, which has no memory for that."""
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
"""Operators that ask a tensor for its shape, dtype and device alone."""

Serve = Callable[[Any, Any, Any], Any]

_SHAPE: Any = torch.Tensor.shape
_DTYPE: Any = torch.Tensor.dtype
_DEVICE: Any = torch.Tensor.device
_LAYOUT: Any = torch.Tensor.layout
"""As torch has them: a class of the program's may have something else of that name."""


def _of_tensors(*names: str) -> frozenset[object]:
    return frozenset(getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


ABOUT_TENSORS = _of_tensors(
    *("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "requires_grad", "ndim"),
    *("is_meta", "itemsize", "nbytes", "grad_fn", "is_leaf"),
    *("__len__", "dim", "size", "numel", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_inference"),
)
"""What torch asks of tensors that has nothing to do with their values."""
ABOUT_GRADIENTS = ABOUT_TENSORS | _of_tensors("grad", "is_quantized", "ndimension")
ABOUT_TILED = ABOUT_TENSORS | _of_tensors("is_quantized", "ndimension")
ABOUT_PARAMETERS = ABOUT_TENSORS | _of_tensors(
    *("grad", "output_nr", "retains_grad", "_version", "grad_dtype"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether it stands for what ``vmap`` maps over."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """The ``_cdata`` of what a tensor, be it mapped over, lies in by strides; 0 if in none."""
    tensor = unwrapped(tensor)
    is_in_one = _LAYOUT.__get__(tensor) == torch.strided and torch._C._has_storage(tensor)
    return torch.Tensor.untyped_storage(tensor)._cdata if is_in_one else 0


def about(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Of what class it may be: what ``placeholder`` makes another one of."""
    return _SHAPE.__get__(tensor), _DTYPE.__get__(tensor), _DEVICE.__get__(tensor)


class _Keyed(torch.Tensor):
    """Torch gives keys to tensors of such a class alone; its data can pass to others, with them."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} of what only lends its data")


def serve_placeholders(serve: Serve) -> None:
    """From now on ``serve(operator, args, kwargs)`` runs what torch is to run on placeholders."""
    if not hasattr(torch.library.Library, "fallback"):
        return  # in older releases they are read as they are, NaN
    of_data = torch.library.Library("aten", "IMPL")
    name = "_has_compatible_shallow_copy_type"  # asks for no values, whenever data are replaced
    of_data.impl(name, torch.library.fallthrough_kernel, _NAME)
    of_all = torch.library.Library("_", "IMPL")
    of_all.fallback(lambda op, *args, **kwargs: _run(serve, op, args, kwargs), _NAME)
    _libraries.extend((of_data, of_all))


def _run(serve: Serve, operator: Any, args: Any, kwargs: Any) -> Any:
    asks_for_no_values = operator._schema.name in _FACTORIES
    if asks_for_no_values and any(map(is_lost, tree_leaves((args, kwargs)))):
        with as_they_are():
            return operator(*args, **kwargs)
    return serve(operator, args, kwargs)


as_they_are: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._ExcludeDispatchKeyGuard, _KEYS
)
"""Placeholders are ordinary tensors inside."""


@own_modes
def placeholder(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, refusal: str
) -> torch.Tensor:
    """A tensor of that shape that takes no memory to speak of; ``refusal`` says why it has no
    values.
    """
    with torch._C._DisableTorchDispatch():
        memory = _memory(dtype, refusal).to(device).untyped_storage()
        face = torch.empty(0, dtype=dtype, device=device)
        if _libraries and not face.is_meta:
            face.data = torch.Tensor._make_wrapper_subclass(
                _Keyed, (0,), dtype=dtype, device=device, _extra_dispatch_keys=_KEYS
            )
        with as_they_are():
            face.set_(memory, 0, shape, (0,) * len(shape))
    if not face.is_meta:
        torch._C._set_throw_on_mutable_data_ptr(face)
    return face


@own_modes
def lost(
    shape: torch.Size,
    stride: Sequence[int],
    dtype: torch.dtype,
    refusal: str | None,
    device: torch.device,
) -> torch.Tensor:
    """A tensor on the meta device, with values on ``device`` before, that no operator computes
    with: they raise ``RuntimeError`` with ``refusal``. What asks for no values works
    (``empty_like``, on which ``to_empty`` rests). With None, or where there were no values, it is
    one of torch's own.
    """
    if refusal is None or device.type == "meta" or not _libraries:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with torch._C._DisableTorchDispatch():
        face: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            _Keyed,
            shape,
            stride,
            dtype=dtype,
            device=torch.device("meta"),
            _extra_dispatch_keys=_KEYS,
        ).data
    storage = face.untyped_storage()
    _losses[storage._cdata] = _Loss(refusal, device)
    finalize(storage, _losses.pop, storage._cdata, None)
    return face


def is_lost(leaf: Any) -> bool:
    """Whether it is one of ``lost``."""
    return is_placeholder(leaf) and unwrapped(leaf).is_meta


def reason_of(leaf: torch.Tensor) -> str | None:
    """Why one of ``lost`` has no values; None for any other tensor."""
    return _refusal_of(leaf) if is_lost(leaf) else None


def device_of_values(tensor: torch.Tensor) -> torch.device:
    """Where it is; of one of ``lost``, where it was."""
    return _losses[storage_of(unwrapped(tensor))].device if is_lost(tensor) else tensor.device


def _memory(dtype: torch.dtype, refusal: str) -> torch.Tensor:
    value = torch.zeros(_TEXT_FROM // dtype.itemsize, dtype=dtype, device="cpu")
    if dtype.is_floating_point or dtype.is_complex:
        value.fill_(float("nan"))
    text = torch.tensor([*refusal.encode()], dtype=torch.uint8, device="cpu")
    return torch.cat([value.view(torch.uint8), text])


def is_placeholder(leaf: Any) -> bool:
    """Whether it is a tensor that operators are not run on as it is."""
    return isinstance(leaf, torch.Tensor) and torch._C._dispatch_keys(leaf).has(_KEY)


def lend(face: torch.Tensor, parameter: torch.Tensor) -> None:
    """From now on ``parameter`` is what has the values that ``face`` stands for."""
    _lenders[face.untyped_storage()._cdata] = parameter


def end_lending(face: torch.Tensor) -> None:
    """Nothing has any more. Idempotent."""
    _lenders.pop(face.untyped_storage()._cdata, None)


def lender_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """The parameter whose data a placeholder was given."""
    return _lenders.get(storage_of(leaf))


def refuse(leaf: torch.Tensor) -> NoReturn:
    """Raise ``RuntimeError`` saying why a placeholder has no values."""
    raise RuntimeError(_refusal_of(leaf))


def _refusal_of(leaf: torch.Tensor) -> str:
    face = unwrapped(leaf)
    device = _DEVICE.__get__(face)
    if device.type == "meta":
        return _losses[storage_of(face)].refusal
    memory: Any = torch.empty(0, dtype=torch.uint8, device=device)
    with torch._C.DisableTorchFunctionSubclass():  # of tiles it would be the memory of the whole
        memory.set_(torch.Tensor.untyped_storage(face))
    return bytes(memory.clone().tolist())[_TEXT_FROM:].decode()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transform has wrapped."""
    if _functorch.is_functionaltensor(tensor):
        return unwrapped(_functorch._unwrap_functional_tensor(tensor, False))
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return unwrapped(_functorch.get_unwrapped(tensor))
    return tensor


def refusal_of_weights(name: str) -> str:
    """What is said about those of the parameter ``name``."""
    return (
        f"this tensor was given the data of {name}, which is offloaded: it can be neither written "
        "to nor differentiated by; give it parameter.detach(), a copy, or do this inside `with "
        "offloaded.gathered([parameter], modify=True):`"
    )


def refusal_of_gradient(name: str) -> str:
    """What is said about the gradient of the parameter ``name``."""
    return (
        f"this tensor was given the data of the gradient of {name}, which is offloaded and has no "
        "values of its own; give it parameter.grad.clone() or offloaded.gradient(parameter)"
    )


def refusal_of_view(name: str) -> str:
    """What is said about a view of the parameter ``name`` after a change of that."""
    return (
        f"this tensor is a view of {name}, which was offloaded as it was taken, from before its "
        "values changed (by step(), load() or gathered(modify=True)) or the block ended; take it "
        "anew after each of these"
    )


def refusal_of_tiled(name: str = "a layer") -> str:
    """What is said about weights that are in tiles."""
    return (
        f"the weight of {name} is in tiles while the model is offloaded, and this memory is not "
        "where they are; reach it through the model, or take its values by clone()"
    )


def refusal_past_tiles(name: str) -> str:
    """What is said where the weight ``name``, which is in tiles, comes to what takes no tiles."""
    return (
        f"{name} is in tiles while the model is offloaded, and was given as it is to a function of "
        "autograd (Function.apply, or torch.utils.checkpoint), whose gradient would reach no tile; "
        "give it weight.clone(), the whole, which gradients flow through to the tiles, or offload "
        "with a larger max_parameter_bytes, which leaves the weight as it is"
    )


_WAYS = "it values: to_empty and load_state_dict, or another block with weights= or offloaded.load"
"""What is to be given to a parameter without values."""
_WAYS_OF_TILES = "it values: to_empty and load_state_dict, or another block with offloaded.load"
"""The same where it is a tile of a weight that stays in tiles, which files do not know."""


def refusal_of_lost(name: str, is_tile: bool = False) -> str:
    """What is said about the parameter ``name`` after a block at whose end nobody could read it."""
    why = "they could not be read back as an offload block ended"
    remedy = f"Call retry() of the RestoreError, or give {_ways(is_tile)}"
    return _refusal_of_valueless(name, why, remedy)


def refusal_of_gone(name: str, is_tile: bool = False) -> str:
    """The same where it was partitioned, and a rank failed."""
    why = "a rank failed in the offload block, with its part of them"
    return _refusal_of_valueless(name, why, f"Give {_ways(is_tile)} of the last checkpoint")


def refusal_of_mixed(name: str, is_tile: bool = False) -> str:
    """The same where a load was stopped, and nothing was loaded after it."""
    why = (
        "what replaced them in the offload block was stopped, they were in part from before and in "
        "part from after it"
    )
    return _refusal_of_valueless(name, why, f"Give {_ways(is_tile)}")


def _ways(is_tile: bool) -> str:
    return _WAYS_OF_TILES if is_tile else _WAYS


def _refusal_of_valueless(name: str, why: str, remedy: str) -> str:
    return f"{name} has no values: {why}, and it is on the meta device since. {remedy}"


def check_not_transformed(name: str) -> None:
    """Raises ``RuntimeError`` inside ``torch.func.jvp``, ``grad`` and others, of which ``name``,
    offloaded, would be a part: what they compute with is wrapped, and wrapped weights cannot be put
    in place. ``vmap`` wraps only what it maps over.
    """
    if _functorch.maybe_current_level() is None:
        return
    for interpreter in _functorch.get_interpreter_stack() or ():
        if interpreter.key() != _functorch.TransformType.Vmap:
            raise RuntimeError(
                f"{name}, which is offloaded, was used inside a transform of torch.func "
                f"({interpreter.key().name.lower()}), which knows tensors in memory alone; use it "
                "inside `with offloaded.gathered():`, pass parameter.detach(), or differentiate "
                "with torch.autograd.grad"
            )


def came_frozen(name: str, refusal: str) -> RuntimeError:
    """What a gradient for a parameter that was frozen before the block ends in."""
    return RuntimeError(
        f"{name} was frozen when it was offloaded, has no optimizer state and {refusal}; to train "
        "it, call requires_grad_(True) before the block (of a trainer: before it offloads the "
        "model, or after its close()), and requires_grad_(False) inside it for as long as it is "
        "not to be trained; where it is not to be trained now, compute under torch.no_grad()"
    )
