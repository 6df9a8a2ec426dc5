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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from infinity.parameters.modes import own_modes

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

Serve = Callable[[Any, Any, Any], Any]


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
    of_all.fallback(lambda op, *args, **kwargs: serve(op, args, kwargs), _NAME)
    _libraries.extend((of_data, of_all))


@contextmanager
def as_they_are() -> Iterator[None]:
    """Placeholders are ordinary tensors inside."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        yield


def placeholder(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, refusal: str
) -> torch.Tensor:
    """A tensor of that shape that takes no memory to speak of; ``refusal`` says why it has no
    values.
    """
    with own_modes(), torch._C._DisableTorchDispatch():
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
    return _lenders.get(_unwrapped(leaf).untyped_storage()._cdata)


def refuse(leaf: torch.Tensor) -> NoReturn:
    """Raise ``RuntimeError`` saying why a placeholder has no values."""
    face = _unwrapped(leaf)
    memory: Any = torch.empty(0, dtype=torch.uint8, device=face.device)
    memory.set_(face.untyped_storage())
    raise RuntimeError(bytes(memory.clone().tolist())[_TEXT_FROM:].decode())


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a transform has wrapped."""
    if _functorch.is_functionaltensor(tensor):
        return _unwrapped(_functorch._unwrap_functional_tensor(tensor, False))
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return _unwrapped(_functorch.get__unwrapped(tensor))
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
