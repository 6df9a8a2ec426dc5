"""What initialises a model, in the order in which that happens when it is built in memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

MARK = "_is_hf_initialized"
"""What Hugging Face calls an attribute of modules and parameters that have their values."""

_MAKES_ANYWHERE = re.compile(r"\btorch\.[A-Z][a-z]*Tensor\(|\btorch\.Tensor\(")


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """Initialises tensors of ``module``, of modules in it, or none.

    ``skips_meta``: it was not run when the model was built if that was on the meta device.
    """

    run: Callable[[], object]
    module: nn.Module
    skips_meta: bool = False


def functions_of(model: nn.Module) -> list[Function]:
    """First every module's ``reset_parameters``, children before parents, which constructors call;
    then each ``_init_weights``, an inner model's before that of what it is in. Adapters of PEFT are
    added to a model after that, and initialise themselves in their own way.
    """
    functions = [found for module in _inside_out(model) for found in _resetting(module)]
    for module in _inside_out(model):
        functions += _initialising(module)
    adapters = {id(module) for layer in model.modules() for module in _adapters_of(layer)}
    functions = [function for function in functions if id(function.module) not in adapters]
    return [*functions, *_initialising_adapters(model)]


def _adapters_of(layer: Any) -> Iterator[nn.Module]:
    """The modules that PEFT has added to a layer."""
    if isinstance(getattr(layer, "adapter_layer_names", None), (tuple, list)):
        for name in layer.adapter_layer_names:
            added = getattr(layer, name, None)
            if isinstance(added, nn.Module):
                yield from added.modules()


def _initialising_adapters(model: nn.Module) -> Iterator[Function]:
    """Those of LoRA that begin as usual; what begins in another way is known to PEFT alone."""
    usual: set[str] = set()
    for module in model.modules():
        configs: Any = getattr(module, "peft_config", None)
        for name, config in configs.items() if isinstance(configs, dict) else ():
            if getattr(config, "init_lora_weights", None) is True:
                usual.add(name)
    for layer in model.modules():
        if callable(getattr(layer, "reset_lora_parameters", None)):
            for name in sorted(usual & {*getattr(layer, "lora_A", ())}):
                yield Function(_reset_lora(layer, name), layer)


def _reset_lora(layer: Any, name: str) -> Callable[[], object]:
    return lambda: layer.reset_lora_parameters(name, True)


def _inside_out(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """As ``module.apply`` goes, each one once."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inside_out(child, seen)
    yield module


def _resetting(module: nn.Module) -> Iterator[Function]:
    if parametrize.is_parametrized(module):
        yield Function(lambda: _reset_parametrized(module), module)
        return
    reset = _reset_of(module)
    if reset is not None:
        yield Function(reset, module)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Any = getattr(module, name, None)
        if callable(reset) and _takes(reset, 0):
            return reset  # type: ignore[no-any-return]
    return None


def _reset_parametrized(module: Any) -> None:
    """As a constructor and ``register_parametrization`` after it: the plain module resets itself,
    and each parametrization takes what it keeps from the result.
    """
    plain: Any = object.__new__(parametrize.type_before_parametrizations(module))
    plain.__dict__.update(module.__dict__)
    plain.__dict__["_parameters"] = dict(module._parameters)
    children = {k: v for k, v in module._modules.items() if k != "parametrizations"}
    plain.__dict__["_modules"] = children
    for name in module.parametrizations:
        like = getattr(module, name)
        plain._parameters[name] = nn.Parameter(torch.empty_like(like, device="cpu"))
    reset = _reset_of(plain)
    if reset is None:
        return
    reset()
    for name, kept in module.parametrizations.items():
        value: Any = plain._parameters[name].detach()
        for parametrization in reversed(kept):
            value = parametrization.right_inverse(value)
        if kept.is_tensor:
            kept.original.data.copy_(value)
            continue
        for number, part in enumerate(value):
            getattr(kept, f"original{number}").data.copy_(part)


def _initialising(owner: nn.Module) -> Iterator[Function]:
    """``owner._init_weights`` on each module in it. A model of Hugging Face inside another one
    initialises its own modules, and the outer one leaves them alone.
    """
    if not _has_init_weights(owner):
        return
    is_hugging_face = _dispatches(owner)
    inner: set[int] = set()
    for module in owner.modules() if is_hugging_face else ():
        if module is not owner and _dispatches(module):
            inner.update(id(m) for m in module.modules())
    for module in _inside_out(owner):
        if id(module) not in inner:
            yield Function(_call(owner, module, is_hugging_face), module, is_hugging_face)


def _call(owner: Any, module: nn.Module, is_hugging_face: bool) -> Callable[[], object]:
    def run() -> None:
        if not is_hugging_face:
            owner._init_weights(module)
            return
        # Its walk marks what is done, and some functions leave alone what has marked parts.
        parts = [part for part in module.modules() if part is not module]
        for part in parts:
            part.__dict__[MARK] = True
        try:
            owner._init_weights(module)
        finally:
            for part in parts:
                part.__dict__.pop(MARK, None)

    return run


def makes_anywhere(module: nn.Module) -> bool:
    """Whether the constructor of ``module`` calls ``torch.Tensor(n)`` or one like it: memory as it
    comes, on the CPU also where everything else is made on the meta device.
    """
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] == "torch" or "__init__" not in kind.__dict__:
            continue
        try:
            source = inspect.getsource(kind.__dict__["__init__"])
        except (OSError, TypeError):
            continue
        if _MAKES_ANYWHERE.search(source):
            return True
    return False


def _has_init_weights(module: Any) -> bool:
    function = getattr(module, "_init_weights", None)
    return callable(function) and _takes(function, 1)


def _dispatches(module: Any) -> bool:
    """Whether it initialises as models of Hugging Face do, of which an inner one has precedence."""
    has_walk = callable(getattr(module, "initialize_weights", None))
    return has_walk and _has_init_weights(module) and hasattr(module, "_initialize_weights")


def _takes(function: Callable[..., object], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True
