"""Hooks on every module: weights in before forward, out after it, inputs in the compute dtype,
honest state dicts. A compiled block is hooked as a whole, and from outside.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.autograd.modifying import Loans
from infinity.autograd.phases import Passes, Phases
from infinity.autograd.refusals import check_call, refuse_compiled, refuse_script
from infinity.autograd.residency import ModuleResidency
from infinity.autograd.saved_tensors import SavedTensors
from infinity.autograd.versions import Versions
from infinity.parameters.compiled import (
    BlockCall,
    NamesOfModules,
    compiled_blocks,
    leave_out,
)
from infinity.parameters.offloaded.handlers import check_not_moving
from infinity.parameters.offloaded.parameter import cannot_be_copied
from infinity.parameters.offloaded.placeholders import check_not_transformed
from infinity.parameters.records import Record
from infinity.tiling.weight import TiledWeight
from swap.interruptions.forks import check_process
from swap.interruptions.undo import Undo

_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
"""Where modules have the kinds of hooks that are registered here, each under a number of its own.
"""
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
"""What they note of some, by that number."""
_OF_FORWARD = _TABLES[:2]
_OF_INSTANCES = ("_apply", "__prepare_scriptable__")
"""What stands before a method of the class of a module, or of a copy of one."""
_OWN, _OF_MODELS = Path(__file__).parents[1], "tiled_linear"
_PARTS = (part.name for part in iter_modules([_OWN]) if part.name != "tiling")
_OF_TILES = (part.name for part in iter_modules([_OWN / "tiling"]) if part.name != _OF_MODELS)
_NO_MODEL = (
    *("aio", "swap", "checkpoint", *(f"infinity.{name}" for name in _PARTS)),
    *(f"infinity.tiling.{name}" for name in _OF_TILES),
)
"""All that is no part of a model, as a ``TiledLinear`` is."""

_Indices = dict[int, tuple[nn.Module, list[int]]]
"""Modules with parameters of each, by identity: the hash of a module may be another after a call
(metrics of torchmetrics have that of their state).
"""


class ModelHooks:
    """Registers on ``attach``; the ``Undo`` given there takes everything off again."""

    def __init__(
        self,
        model: nn.Module,
        records: list[Record],
        residency: ModuleResidency,
        phases: Phases,
        versions: Versions,
        saved: SavedTensors,
        compute_dtype: torch.dtype | None = None,
        passes: Passes | None = None,
        loans: Loans | None = None,
    ) -> None:
        self._process, self._records = os.getpid(), records
        self._passes, self._loans = passes, loans
        self._thread = threading.local()
        self._model = model
        self._versions = versions
        self._saved = saved
        self._residency = residency
        self._phases = phases
        self._compute_dtype = compute_dtype
        index = {id(record.parameter): record.index for record in records}
        self._own: _Indices = {
            id(module): (module, [index[id(p)] for p in module.parameters(recurse=False)])
            for module in model.modules()
        }
        self._blocks: _Indices = {}
        """By what is called of a compiled block: the parameters of all modules in it."""
        self._copies: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        """Of modules without parameters, by identity: they have our hooks, too."""
        self._names = NamesOfModules(model)

    def attach(self, undo: Undo) -> None:
        undo.callback(self._detach)
        for module, _ in self._own.values():
            self._hook(module)
            module.register_state_dict_pre_hook(self._refuse_state_dict)
            module.register_load_state_dict_pre_hook(self._refuse_load_state_dict)
            self._guard_conversion(module)
            refuse_script(module, undo)
        self._model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        self._find_blocks(self._model)

    def _hook(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, prepend=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _detach(self) -> None:
        """Idempotent. By what modules have, not by handles: an interrupt may have taken one."""
        self._names.__exit__()
        hooked = (module for module, _ in (*self._own.values(), *self._blocks.values()))
        for module in (*hooked, *self._living_copies()):
            BlockCall.take_off(module)
            self._unhook(module, _TABLES)
            for name in _OF_INSTANCES:
                module.__dict__.pop(name, None)
        self._end_autocast()  # of a pass that an interrupt ended

    def _unhook(self, module: nn.Module, tables: Sequence[str]) -> None:
        for table in tables:
            hooks = vars(module).get(table, {})  # a copy has none whose making has failed
            for number, hook in list(hooks.items()):
                if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                    for marks in _MARKS:
                        getattr(module, marks).pop(number, None)
                    del hooks[number]

    def _find_blocks(self, within: nn.Module) -> None:
        """What of ``within`` is compiled by now is hooked as that, and from outside."""
        for block in compiled_blocks(within):
            if id(block) not in self._blocks or not BlockCall.stands_for(block):
                if block is self._model:
                    refuse_compiled(block)
                self._hook_block(block)

    def _hook_block(self, block: nn.Module) -> None:
        """Can be done again after an interrupt."""
        self._names.find()
        inside = {*block.modules()}
        indices = sorted(self._all_of(block))
        self._residency.check_room(type(block).__name__, indices)
        BlockCall.take_off(block)
        for module in (block, *inside):
            self._unhook(module, _OF_FORWARD)
        self._residency.unwatch(inside)
        leave_out(_NO_MODEL, TiledWeight)
        BlockCall(block, self._enter, self._leave).put_on()
        self._blocks[id(block)] = block, indices

    def _guard_conversion(self, module: nn.Module) -> None:
        """Whatever converts or moves a module (``to``, ``half``, ``cuda``) goes through ``_apply``.

        It would replace the data of parameters, and computing would part from training. What asks
        for the dtype and the device that the module has changes nothing and is let through.
        """

        module._apply = partial(_unchanged, module)  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHooks:
        """A module is being copied, which is in ``memo`` with its copy by now. Of those that have
        parameters copies are refused.
        """
        if any(id(record.parameter) in memo for record in self._records):
            raise cannot_be_copied()
        for known in (*self._own, *map(id, self._living_copies())):
            if known in memo:
                self._copies[id(memo[known])] = memo[known]
        return self

    def _living_copies(self) -> list[nn.Module]:
        """Other threads may make some meanwhile."""
        found = (reference() for reference in self._copies.valuerefs())
        return [copied for copied in found if copied is not None]

    def _check(self, module: nn.Module) -> list[int]:
        """The module's own parameters. Raises ``RuntimeError`` for a call that cannot be."""
        known = self._blocks.get(id(module), self._own.get(id(module)))
        if known is None and id(module) not in self._copies:
            raise RuntimeError(
                f"a copy of an offloaded {type(module).__name__} was called (DataParallel makes "
                "some), which has no weights; call the model itself"
            )
        self._check_process(module)
        check_call(type(module).__name__)  # a layer may be compiled by itself
        check_not_transformed(type(module).__name__)
        check_not_moving(f"the {type(module).__name__}")
        return [] if known is None else known[1]

    def _check_process(self, module: nn.Module) -> None:
        """Raises ``RuntimeError`` in a forked child, before anything is waited for: another thread
        of the parent may have had any lock.
        """
        if os.getpid() != self._process:
            names = [self._records[index].name for index in sorted(self._all_of(module))]
            what = next(iter(names), type(module).__name__)
            check_process(self._process, f"the offloaded {what}")

    def _enter(self, module: nn.Module, args: Any) -> None:
        try:
            own = self._check(module)
        except Exception:
            # Torch calls ``_leave`` all the same, which is not to end a pass that goes on: that of
            # the module that a handler of a signal calls once more.
            self._thread.refused = module
            raise
        if not self._residency.is_computing:
            self._find_blocks(module)
            self._saved.join_thread()
            if self._loans is not None:
                self._loans.take_in_left()
            # What an interrupted pass found is what it should have left.
            self._thread.__dict__.setdefault("kept", torch.is_autocast_cache_enabled())
            if self._passes is not None:
                self._passes.begins(module)
        if torch.is_autocast_cache_enabled():
            # It would keep a cast of every weight until the region ends, beside the budget.
            torch.set_autocast_cache_enabled(False)
        if module is self._model:
            self._versions.check_values()
            self._phases.forward_begins()
        is_compiled = id(module) in self._blocks
        self._residency.enter(module, own, sys._getframe(1), is_compiled=is_compiled)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._thread.__dict__.pop("refused", None) is module:
            return
        is_within = self._residency.leave(module)
        if module is self._model:
            self._phases.forward_ends()
        if not is_within:
            self._end_autocast()
            self._saved.leave_thread()
            if self._loans is not None:
                self._loans.end_forward()

    def _end_autocast(self) -> None:
        """The program's autocast cache is as it was before the outermost pass of this thread."""
        kept = self._thread.__dict__
        if "kept" in kept:
            torch.set_autocast_cache_enabled(kept["kept"])
            kept.pop("kept", None)  # behind it, for an interrupt may come between the two

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Floating-point inputs of the model take the dtype of its weights, or no operation would
        accept them.
        """
        dtype = self._compute_dtype
        if dtype is None:
            return None

        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float else value

        return tree_map(cast, args), tree_map(cast, kwargs)

    def _refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._residency.is_gathered(self._all_of(module)):
            raise RuntimeError(
                "state_dict() of an offloaded model would hold placeholders; call "
                "offloaded.save(path) or offloaded.export(folder), which writes the weights that "
                "save_pretrained does, or ask inside `with offloaded.gathered():`; adapters are "
                "loaded into the model before the block, or after it (a trainer ends it by close())"
            )

    def _refuse_load_state_dict(self, module: nn.Module, *_: Any) -> None:
        if not self._residency.is_gathered(self._all_of(module)):
            raise RuntimeError(
                "load_state_dict() cannot reach the values of an offloaded model; call "
                "offloaded.load(path), pass weights= to offload, or ask inside `with "
                "offloaded.gathered(modify=True):`"
            )

    def _all_of(self, module: nn.Module) -> set[int]:
        found = (self._own.get(id(inner)) for inner in module.modules())
        return {index for known in found if known is not None for index in known[1]}


def _unchanged(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        _check_unchanged(fn, tensor)
    return module


def _check_unchanged(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    """Raise unless ``fn`` leaves a tensor like ``tensor`` as it is; tries it on a small one."""
    small = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    was_shared = small.is_shared()
    if fn(small) is not small or small.is_shared() != was_shared:
        raise RuntimeError(
            f"an offloaded model stays {tensor.dtype} on {tensor.device}, where it is; convert it "
            "before the block, or pass compute_dtype= and device= to offload"
        )
