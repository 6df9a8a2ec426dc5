"""Workers: optimizers that update throw-away or staged parameters, and what these are given."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity.optim.torch_optimizer.values import same
from infinity.parameters.offloaded.becoming import attributes_of

Step = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]]
"""A step of one parameter, by group options and state: the state after it, and the options."""


def options_in(group: Mapping[str, Any], memo: dict[int, Any] | None = None) -> dict[str, Any]:
    """A copy of all that a group holds but its parameters; with one ``memo``, what several groups
    have together their copies have together. Raises ``ValueError`` for what cannot be copied.
    """
    memo = {} if memo is None else memo
    options = {}
    for key, value in group.items():
        if key != "params":
            try:
                options[key] = copy.deepcopy(value, memo)
            except Exception as error:
                raise ValueError(
                    f"a parameter group has {key!r}, which cannot be copied ({error}): options are "
                    "fixed with each step; let it have numbers, text and tensors"
                ) from error
    return options


def options_at(options: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """The options of a group for the parameter at ``position`` of it alone."""
    if options.get("param_names") is None:
        return options
    return {**options, "param_names": [options["param_names"][position]]}


def like(parameter: torch.Tensor, values: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of ``values`` with the attributes of ``parameter``; tensors among them that have
    its shape, or one that is expanded to it, get that of ``values``.
    """
    leaf = torch.nn.Parameter(values)
    for name, value in attributes_of(parameter).items():
        is_tensor = isinstance(value, torch.Tensor) and values.dim() == parameter.dim()
        shape = _shape_for(values, parameter, value) if is_tensor else None
        if shape is not None and shape != value.shape:
            places = torch.arange(shape.numel(), device="cpu") % max(1, value.numel())
            value = value.detach().reshape(-1)[places].view(shape)
        setattr(leaf, name, value)
    return leaf


def _shape_for(
    values: torch.Tensor, parameter: torch.Tensor, value: torch.Tensor
) -> torch.Size | None:
    """What the shape of an attribute of ``parameter`` is for one like ``values``; None if it has
    nothing to do with the parameter's.
    """
    if value.dim() != parameter.dim():
        return None
    sizes = []
    for size, whole, here in zip(value.shape, parameter.shape, values.shape, strict=True):
        if size not in (1, whole):
            return None
        sizes.append(here if size == whole else 1)
    return torch.Size(sizes)


def shape_like(dimensions: int) -> tuple[int, ...]:
    """Of a throw-away parameter of as many dimensions."""
    return (8, 4, *[2] * dimensions)[:dimensions]


def advance(step: Step, group: dict[str, Any], *, has_gradients: bool) -> set[str]:
    """Let ``group`` be as a step leaves it that some of its parameters took part in, or none; gives
    the keys that changed.
    """
    if not group["params"]:
        return set()
    position, model = max(enumerate(group["params"]), key=lambda found: found[1].dim())
    leaf = like(
        model, torch.zeros(shape_like(max(1, model.dim())), dtype=torch.float32, device="cpu")
    )
    leaf.grad = torch.ones_like(leaf) if has_gradients else None
    before = options_at(options_in(group), position)
    _, after = step(leaf, {**options_at(options_in(group), position)}, {})
    changed = {key for key in after if key not in before or not same(before[key], after[key])}
    group.update({key: after[key] for key in changed})
    return changed


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of the class of a worker, which has no hooks: see ``forget_hooks``."""
    step: Any = type(optimizer).step
    # Torch puts its own function around the step, which calls the hooks of all optimizers.
    hooked: Any = torch.optim.Optimizer.profile_hook_step
    of_torch = getattr(step, "__globals__", None) is hooked.__globals__
    if of_torch and step.__code__.co_name == "wrapper":
        step = step.__wrapped__
    step(optimizer)


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def forget_hooks(worker: torch.optim.Optimizer) -> None:
    """Hooks are for whole steps; they are on the optimizer that users hold."""
    for name in _STEP_HOOKS:
        setattr(worker, name, OrderedDict())


def share_hooks(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Let steps of ``optimizer`` call the hooks on ``other``, also those that come and go later."""
    for name in _STEP_HOOKS:
        setattr(optimizer, name, getattr(other, name))
