"""From the optimizer and the schedulers that a program made over a model in memory to those of the
offloaded model: the same groups, options and rates.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

import infinity
from infinity.arguments import Directories
from infinity.block import OffloadBlock
from infinity.model import training_of
from infinity.optim.torch_optimizer.probing import check_made_state
from infinity.optim.torch_optimizer.workers import share_hooks
from infinity.parameters.compiled import NamesOfModules
from infinity.values.checkpoint_tensors import checkpoint_tensors_of

Choice = infinity.AdamW | Callable[[Any], torch.optim.Optimizer] | None
_OWN = ("amsgrad", "maximize", "differentiable")
"""Options of ``torch.optim.AdamW`` that ``infinity.AdamW`` has not."""
_HOW = ("foreach", "capturable", "fused", "decoupled_weight_decay", "params")
"""Those that say how it computes, not what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """What loops take of the arguments of ``infinity.offload``; ``state_dtype`` is that of the
    moments where the optimizer is ``torch.optim.AdamW``.
    """

    nvme: Directories
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    compute_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    activations: str = "keep"
    max_parameter_bytes: int | str | None = None
    weights: str | os.PathLike[str] | None = None
    verify_swap: bool = False

    def block(
        self,
        model: nn.Module,
        optimizer: Choice,
        device: torch.device,
        weights: str | os.PathLike[str] | None = None,
    ) -> OffloadBlock:
        """``infinity.offload``, with other ``weights`` if there are some; raises as it does."""
        return infinity.offload(
            model,
            self.nvme,
            optimizer=optimizer,
            device=device,
            compute_dtype=self.compute_dtype,
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            activations=self.activations,
            max_parameter_bytes=self.max_parameter_bytes,
            weights=weights or self.weights,
            verify_swap=self.verify_swap,
        )


def enter_offload(
    stack: ExitStack,
    model: nn.Module,
    made: torch.optim.Optimizer | None,
    options: OffloadOptions,
    device: torch.device,
) -> infinity.OffloadedModel:
    """Offload ``model`` until ``stack`` is closed, to be trained as ``made`` says; for inference
    where that is None. Raises as ``infinity.offload``, and ``ValueError`` naming what of ``made``
    cannot be taken over.
    """
    names, chosen = [], None
    if made is not None:
        is_tiled = options.max_parameter_bytes is not None
        chosen = choice_of(made, model, options.state_dtype, is_tiled=is_tiled)
        names = names_of(model, made)
    offloaded = stack.enter_context(options.block(model, chosen, device))
    if made is not None:
        adopt(offloaded, made, names)
    return offloaded


def is_native(made: torch.optim.Optimizer) -> bool:
    """Whether ``infinity.AdamW`` computes what this optimizer does."""
    if type(made) is not torch.optim.AdamW:
        return False
    return not any(group.get(name) for group in made.param_groups for name in _OWN)


def choice_of(
    made: torch.optim.Optimizer, model: nn.Module, state_dtype: torch.dtype, *, is_tiled: bool
) -> Choice:
    """What to pass to ``infinity.offload`` for an optimizer that a program made of ``model``.

    Raises ``ValueError`` naming what cannot be taken over.
    """
    _check(made, model)
    kind = type(made).__name__
    if is_native(made):
        first = made.param_groups[0]
        options = {name: first[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return infinity.AdamW(state_dtype=state_dtype, **options)
    if state_dtype != torch.float32:
        raise ValueError(
            f"state_dtype={state_dtype} is an option of AdamW; {kind} keeps state in dtypes of its "
            "own"
        )
    if is_tiled:
        raise ValueError(
            f"max_parameter_bytes cuts layers into tiles, which {kind} was not made of; leave it "
            "out, or use torch.optim.AdamW"
        )
    return lambda _: made


def _check(made: torch.optim.Optimizer, model: nn.Module) -> None:
    if any(made.state.values()):
        _check_state(made)
    grouped = {id(p) for group in made.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in grouped:
            raise ValueError(
                f"{name} is in no group of the optimizer; add it, or call requires_grad_(False) "
                "if it is not to be trained"
            )
        grouped.discard(id(parameter))
    if grouped:
        raise ValueError(
            "the optimizer has parameters that are not of the model to be offloaded; put all "
            "models that it trains into one torch.nn.ModuleDict, and give that in their place"
        )


def _check_state(made: torch.optim.Optimizer) -> None:
    """Raises ``ValueError`` for state that is not what the class makes when it is called."""
    try:
        if is_native(made):
            raise ValueError("torch.optim.AdamW makes none before its first step")
        check_made_state(made)
    except ValueError as error:
        raise ValueError(
            f"the {type(made).__name__} has state from steps in memory, which cannot be taken "
            f"over; prepare it before its first step ({error})"
        ) from error


def names_of(model: nn.Module, made: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters in each of the groups, but for those that are frozen, as they are called
    inside the block.
    """
    with NamesOfModules(model):
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    return [
        [names[id(p)] for p in group["params"] if id(p) in names] for group in made.param_groups
    ]


def adopt(
    offloaded: infinity.OffloadedModel,
    made: torch.optim.Optimizer,
    names: Iterable[Iterable[str]],
) -> None:
    """Give ``offloaded.optimizer`` the groups of ``made``, of the parameters with these names, and
    the hooks on its steps; one of a factory has both.
    """
    if is_native(made):
        set_groups(offloaded, made.param_groups, names)
        share_hooks(offloaded.optimizer, made)


def set_groups(
    offloaded: infinity.OffloadedModel,
    groups: Iterable[Mapping[str, Any]],
    names: Iterable[Iterable[str]],
) -> None:
    """Give ``offloaded.optimizer`` these groups, of the parameters with these names outside."""
    training = training_of(offloaded)
    parts = {
        leaf.name: [part.parameter for part in leaf.parts]
        for leaf in checkpoint_tensors_of(training.model, training.records)
    }
    offloaded.optimizer.param_groups.clear()
    for group, members in zip(groups, names, strict=True):
        options = {key: value for key, value in group.items() if key not in _OWN + _HOW}
        parameters = [part for name in members for part in parts[name]]
        offloaded.optimizer.add_param_group(options | {"params": parameters})


def give_rates_back(made: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Let ``made`` go on with the rates that schedulers have given ``optimizer`` in its place."""
    if optimizer is not made:
        for theirs, ours in zip(made.param_groups, optimizer.param_groups, strict=True):
            theirs["lr"] = ours["lr"]


def redirect(scheduler: Any, old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let a scheduler that was made with ``old`` set the rates of ``new``."""
    for inner in getattr(scheduler, "_schedulers", ()):
        redirect(inner, old, new)
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
        _note_steps(new)


def _note_steps(optimizer: Any) -> None:
    """As a scheduler does when it is made, to warn of one that steps before the optimizer."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step, found = type(optimizer).step, weakref.ref(optimizer)

    @wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        optimizer: Any = found()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted
