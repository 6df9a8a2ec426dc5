"""The models of a trainer while they are offloaded: the one that is trained, and those beside it
that are not (a reference, a teacher, rewards), within one budget.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import infinity
from infinity.arguments import make_budget
from infinity.block import OffloadBlock
from infinity.integrations import takeover
from infinity.integrations.takeover import OffloadOptions
from infinity.integrations.transformers import optimizers
from infinity.integrations.transformers.model_files.methods import serve_methods
from infinity.integrations.whole_weights import let_take_tiles
from infinity.parameters.compiled import NamesOfModules
from swap.tiers import format_bytes

logger = logging.getLogger(__name__)
_TRAINED_PARTS = 4
"""Bytes of training state for each byte of weights; what is not trained has the weights alone."""
_BESIDE = ("ref_model", "teacher_model", "reward_model", "reward_funcs")
"""Where trainers keep models that they do not train."""

MakeOptimizer = Callable[[], torch.optim.Optimizer]
WeightsFor = Callable[[nn.Module], str | os.PathLike[str] | None]


class Life:
    """Offloaded models, until ``close`` or until nothing refers to this any more.

    At the end of the process nothing is read back: values that were not saved are lost, and a
    warning says so.
    """

    def __init__(
        self,
        trainer: Any,
        beside: Sequence[nn.Module],
        options: OffloadOptions,
        weights: WeightsFor,
        device: torch.device,
        optimizer: MakeOptimizer | None,
    ) -> None:
        """Of the model of ``trainer``. ``weights`` says where the values of one come from that has
        none.
        """
        model: nn.Module = trainer.model
        self._trainer = weakref.ref(trainer)
        self._models = (model, *beside)
        self._has_values_elsewhere = any(p.is_meta for p in model.parameters())
        self.trains = optimizer is not None
        self.is_saved = True
        self.numbered: list[list[str]] = []
        """Names of all parameters of the optimizer in memory, in the order of its groups."""
        if options.max_parameter_bytes is not None:
            let_take_tiles(type(trainer))
        stack = ExitStack()
        self._blocks: list[OffloadBlock] = []
        with stack:
            enter = partial(_enter, stack, self._blocks, weights)
            make = None if optimizer is None else partial(self._made, model, optimizer)
            self.offloaded = _within(enter, model, beside, options, device, make)
            serve_methods(stack, self.offloaded)
            stack = stack.pop_all()
        self._leave = weakref.finalize(self, stack.close)
        self._leave.atexit = False  # there, it would read whole models into memory for nothing
        _lives.add(self)

    def _made(self, model: nn.Module, optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """The optimizer; made first of the model as it is outside, maybe again of its tiles."""
        made = optimizer()
        if not self.numbered:
            with NamesOfModules(model):
                names = {id(p): name for name, p in model.named_parameters()}
            groups = made.param_groups
            self.numbered = [[names.get(id(p), "") for p in g["params"]] for g in groups]
        return made

    def close(self) -> None:
        """Give all models their values back. Idempotent. Raises as leaving a block does."""
        _lives.discard(self)
        self._leave()

    def give_way(self, models: Sequence[nn.Module]) -> None:
        """Let another trainer have its models, if one of these is among them, by closing the
        trainer that has them. Raises ``ValueError`` where they would be without values then.
        """
        own = {id(module) for model in self._models for module in model.modules()}
        if not any(id(module) in own for model in models for module in model.modules()):
            return
        kind, trainer = type(self._models[0]).__name__, self._trainer()
        if trainer is not None and trainer.is_in_train:
            raise ValueError(
                f"this {kind} is offloaded by another trainer, which is in the midst of train(); "
                "use evaluate() and predict() of that one"
            )
        if self._has_values_elsewhere:
            raise ValueError(
                f"this {kind} is offloaded by another trainer, which loaded it on the way in: when "
                "that one lets go, it has no values. Call save_model(folder) and close() of that "
                "trainer, and give the new one the model of that folder"
            )
        logger.warning(
            "This %s is offloaded by another trainer, which is closed: the weights go on as they "
            "are, what its optimizer keeps is dropped but for what was saved.",
            kind,
        )
        if trainer is None:
            self.close()
        else:
            trainer.close()

    def end_of_process(self) -> None:
        """Let go of what was saved; a block says itself that the rest is lost."""
        if self.is_saved and self._leave.alive:
            for block in self._blocks:
                block.discard()


_lives: weakref.WeakSet[Life] = weakref.WeakSet()


@atexit.register  # later than that of blocks, so it is called before
def _end_all() -> None:
    for life in list(_lives):
        life.end_of_process()


def make_way(models: Sequence[nn.Module]) -> None:
    """Close trainers that have one of ``models`` offloaded, as two are used one after the other in
    memory. Raises as ``Life.give_way``.
    """
    for life in list(_lives):
        life.give_way(models)


def make_way_early(trainer: type, mixin: type, given: Iterable[Any]) -> None:
    """``make_way`` of the models among ``given``, if a constructor that ``mixin`` calls in
    ``trainer`` is not transformers' own: those of TRL add adapters, or resize embeddings.
    """
    bases = trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]
    makers = [base for base in bases if "__init__" in vars(base) and base is not object]
    if any(base.__module__.partition(".")[0] != "transformers" for base in makers):
        make_way([model for model in given if isinstance(model, nn.Module)])


def models_beside(trainer: Any) -> list[nn.Module]:
    """Models that a trainer computes with and does not train, each once."""
    found: dict[int, nn.Module] = {}
    for name in _BESIDE:
        value = getattr(trainer, name, None)
        for model in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(model, nn.Module) and model is not trainer.model:
                found[id(model)] = model
    own = {id(parameter) for parameter in trainer.model.parameters()}
    return [m for m in found.values() if not any(id(p) in own for p in m.parameters())]


def _within(
    enter: Callable[..., infinity.OffloadedModel],
    model: nn.Module,
    beside: Sequence[nn.Module],
    options: OffloadOptions,
    device: torch.device,
    optimizer: MakeOptimizer | None,
) -> infinity.OffloadedModel:
    """Enter all of them. Raises ``BudgetError`` with the least budget for all together."""
    if not beside:
        return _enter_trained(enter, model, options, device, optimizer)
    whole = make_budget(options.host_memory, None).host_bytes
    least = [_least_of(other, options, device) for other in beside]
    fair = [max(n, _share(whole, other, model)) for n, other in zip(least, beside, strict=True)]
    shares = fair
    try:
        rest = replace(options, host_memory=max(1, whole - sum(fair)))
        offloaded = _enter_trained(enter, model, rest, device, optimizer)
    except infinity.BudgetError as error:
        needed, shares = error.least_host_bytes + sum(least), least
        if error.least_host_bytes == 0 or whole < needed:
            raise infinity.BudgetError(
                f"host_memory={format_bytes(whole)} is too small for the model and the "
                f"{len(beside)} beside it, which need at least {format_bytes(needed)} ({needed} "
                f"bytes) together: {error}",
                least_host_bytes=needed,
            ) from error
        rest = replace(options, host_memory=whole - sum(least))
        offloaded = _enter_trained(enter, model, rest, device, optimizer)
    for other, share in zip(beside, shares, strict=True):
        enter(other, replace(options, host_memory=share, weights=None), device, None)
    return offloaded


def _enter_trained(
    enter: Callable[..., infinity.OffloadedModel],
    model: nn.Module,
    options: OffloadOptions,
    device: torch.device,
    optimizer: MakeOptimizer | None,
) -> infinity.OffloadedModel:
    if optimizer is None:
        return enter(model, options, device, None)
    made = optimizer()
    names = takeover.names_of(model, made)
    chosen = optimizers.chosen(made, optimizer, options.state_dtype)
    offloaded = enter(model, options, device, chosen)
    takeover.adopt(offloaded, made, names)
    return offloaded


def _enter(
    stack: ExitStack,
    blocks: list[OffloadBlock],
    weights: WeightsFor,
    model: nn.Module,
    options: OffloadOptions,
    device: torch.device,
    optimizer: Any,
) -> infinity.OffloadedModel:
    block = options.block(model, optimizer, device, weights(model))
    offloaded = stack.enter_context(block)
    blocks.append(block)
    return offloaded


def _least_of(model: nn.Module, options: OffloadOptions, device: torch.device) -> int:
    """Bytes of host memory that inference with ``model`` needs."""
    return infinity.plan(
        model,
        host_memory=1,
        device=device,
        compute_dtype=options.compute_dtype,
        optimizer=None,
        activations=options.activations,
        max_parameter_bytes=options.max_parameter_bytes,
        verify_swap=options.verify_swap,
    ).least_host_bytes


def _share(whole: int, other: nn.Module, model: nn.Module) -> int:
    """Bytes of the budget for a model that is not trained."""
    mine, trained = _bytes_of(other), _TRAINED_PARTS * _bytes_of(model)
    return whole * mine // max(1, mine + trained)


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
