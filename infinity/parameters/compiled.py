"""Compiled blocks: modules of a model whose calls torch.compile has made graphs of, by
``module.compile()``, as ``torch.compile(module)`` in their place, or by a compiled ``forward``.

A graph takes the weights that are there when it is called, and knows nothing of hooks within. So a
block is one piece: all of its weights are in place from before a call until it has returned, and
no module in it is hooked or watched. Its parameters have their own class meanwhile (see
``ModuleResidency``), so that the graphs are those of the model in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

Enter = Callable[[nn.Module, Any], None]
Leave = Callable[[nn.Module, Any, Any], None]
_COMPILER = "torch._dynamo"
"""Where this was not imported, nothing has been compiled."""


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns, which has the module within it."""
    frames = sys.modules.get(f"{_COMPILER}.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def has_compiled_call(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None and not is_wrapper(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether calling ``module`` runs graphs."""
    return (
        module._compiled_call_impl is not None
        or is_wrapper(module)
        or _is_graph(vars(module).get("forward"))
        or _is_graph(getattr(type(module), "forward", None))
    )


def _is_graph(forward: Any) -> bool:
    """Whether it is what ``torch.compile`` makes of a function."""
    is_compiled = getattr(forward, "_torchdynamo_orig_callable", None) is not None
    return is_compiled and not getattr(forward, "_torchdynamo_disable", False)


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """The compiled blocks of ``model`` that lie in no other, as what is called of each. Asked for
    at every pass.
    """
    found: list[nn.Module] = []
    if _COMPILER not in sys.modules:
        return found
    seen, left = {model}, [model]
    while left:
        module = left.pop()
        if is_compiled(module):
            found.append(module)
            continue
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return found


class NamesOfModules:
    """Context manager: what ``torch.compile(module)`` returned is no module of its own inside, as
    far as names go: those of parameters, buffers and modules in it have no ``_orig_mod``, and are
    the ones that the same model has when it is not compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changed: list[nn.Module] = []

    def __enter__(self) -> None:
        self.find()

    def find(self) -> None:
        """Those that have come into the model since, too."""
        if _COMPILER in sys.modules:
            self._find(self._model, set())

    def _find(self, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module._modules.values():
            if child is not None:
                self._find(child, seen)
        if is_wrapper(module) and "named_modules" not in vars(module):
            self._changed.append(module)
            vars(module)["named_modules"] = module.get_submodule("_orig_mod").named_modules

    def __exit__(self, *_: object) -> None:
        """Idempotent."""
        for module in self._changed:
            vars(module).pop("named_modules", None)


class BlockCall:
    """What stands for the compiled call of ``module``: the hooks are run around it, and not within,
    where torch has those of a module that is compiled by ``compile()``.
    """

    def __init__(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        self._module, self._enter, self._leave = module, enter, leave
        self.compiled: Any = module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._enter(self._module, args)
            return self.compiled(*args, **kwargs)
        finally:
            self._leave(self._module, args, None)

    @staticmethod
    def stands_for(module: nn.Module) -> bool:
        """Whether calls of ``module`` go through one."""
        return isinstance(module._compiled_call_impl, BlockCall)

    @staticmethod
    def take_off(module: nn.Module) -> None:
        """The compiled call is called again. Idempotent."""
        call = module._compiled_call_impl
        if isinstance(call, BlockCall):
            module._compiled_call_impl = call.compiled
