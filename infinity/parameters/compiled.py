"""Compiled blocks: modules of a model whose calls torch.compile has made graphs of, by
``module.compile()``, as ``torch.compile(module)`` in their place, or by a compiled ``forward``.

A graph takes the weights that are there when it is called, and knows nothing of hooks within. So a
block is one piece: all of its weights are in place from before a call until it has returned, and
no module in it is hooked or watched. Its parameters have their own class meanwhile (see
``ModuleResidency``), so that the graphs are those of the model in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Enter = Callable[[nn.Module, Any], None]
Leave = Callable[[nn.Module, Any, Any], None]
_COMPILER = "torch._dynamo"
"""Where this was not imported, nothing has been compiled."""


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns, which has the module within it."""
    # No module has it, nor has the module, where another thread is just importing that.
    kind = getattr(sys.modules.get(f"{_COMPILER}.eval_frame"), "OptimizedModule", None)
    return kind is not None and isinstance(module, kind)


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
    """What is called in place of a compiled block: ``enter`` and ``leave`` are run around it, and
    not within, where torch has the hooks of a module that is compiled by ``compile()``; and
    ``leave`` is run whatever ends the call, be it a signal, which torch's hooks do not see.
    """

    def __init__(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        self._module, self._enter, self._leave = module, enter, leave
        self._compiled: Any = vars(module).get(_CALL)
        self._call = self._compiled or module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._enter(self._module, args)
            return self._call(*args, **kwargs)
        finally:
            self._leave(self._module, args, None)

    def put_on(self) -> None:
        """Past ``setattr``, which for what ``torch.compile`` returned is that of its module."""
        vars(self._module)[_CALL] = self

    @staticmethod
    def stands_for(module: nn.Module) -> bool:
        """Whether calls of ``module`` go through one."""
        return isinstance(vars(module).get(_CALL), BlockCall)

    @staticmethod
    def take_off(module: nn.Module) -> None:
        """What was called before is called again. Idempotent."""
        call = vars(module).get(_CALL)
        if isinstance(call, BlockCall):
            if call._compiled is None:
                vars(module).pop(_CALL, None)
            else:
                vars(module)[_CALL] = call._compiled


_CALL = "_compiled_call_impl"
"""What torch calls of a module that has it, in place of hooks and ``forward``."""


def leave_out(names: Iterable[str], kind: type) -> None:
    """No graphs are made of code in these packages and modules: autograd calls some of it where a
    block computes between graphs. Nor of what is done to tensors of this ``kind``.
    """
    rules = sys.modules[f"{_COMPILER}.trace_rules"]
    sys.modules[f"{_COMPILER}.config"].nontraceable_tensor_subclasses.add(kind)
    for name in names:
        if name not in _left_out:
            rules.add(name)
            _left_out.add(name)


_left_out: set[str] = set()
