"""Workers: optimizers that update throw-away or staged parameters, and what these are given."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch

from infinity.optim.thread_settings import ThreadSettings, Within
from infinity.optim.torch_optimizer.values import NOT_COPIED, same
from infinity.parameters.offloaded.becoming import attributes_of

Step = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]]
"""A step of one parameter, by group options and state: the state after it, and the options."""


def options_in(
    group: Mapping[str, Any],
    memo: dict[int, Any] | None = None,
    *,
    names: Collection[str] | None = None,
) -> dict[str, Any]:
    """A copy of all that a group holds but its parameters, or of those ``names``; with one
    ``memo``, what several groups have together their copies have together. Raises ``ValueError``
    for what cannot be copied.
    """
    memo = {} if memo is None else memo
    options = {}
    for key, value in [*group.items()]:  # at once: the program may add some on its thread
        if key != "params" and (names is None or key in names):
            try:
                options[key] = copy.deepcopy(value, memo)
            except NOT_COPIED as error:
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


def values_of(leaf: torch.Tensor) -> torch.Tensor:
    """Its memory, as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.detach()


def leaf_of(
    values: torch.Tensor, kind: type[torch.Tensor], attributes: Mapping[str, Any]
) -> torch.nn.Parameter:
    """A parameter of that class with ``values`` and attributes."""
    made = torch.nn.Parameter(values)
    vars(made).update(attributes)
    if kind is not torch.nn.Parameter:
        with suppress(TypeError):  # of another layout, which cannot be offloaded
            leaf: Any = made
            leaf.__class__ = kind
    return made


def is_of_torch(kind: type) -> bool:
    """Whether a class is defined in torch, which keeps to what updates need where it can at all."""
    return kind.__module__.partition(".")[0] == "torch"


def has_own(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Whether its ``method`` is another one than torch's."""
    by = next(kind for kind in type(optimizer).__mro__ if method in vars(kind))
    return method in vars(optimizer) or not is_of_torch(by)


def kind_in_updates(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of parameters of ``kind`` as they are updated: their own, if operations give plain
    tensors of them.
    """
    is_plain = (
        issubclass(kind, torch.nn.Parameter)
        and kind.__torch_function__ == torch.nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ == torch.nn.Parameter.__torch_dispatch__
    )
    return kind if is_plain else torch.nn.Parameter


def like(
    parameter: torch.Tensor, values: torch.Tensor, kind: type[torch.Tensor] = torch.nn.Parameter
) -> torch.nn.Parameter:
    """A parameter of ``values`` with the attributes of ``parameter``; tensors among them that have
    its shape, or one that is expanded to it, get that of ``values``.
    """
    attributes = attributes_of(parameter)
    for name, value in attributes.items():
        is_tensor = isinstance(value, torch.Tensor) and values.dim() == parameter.dim()
        shape = _shape_for(values, parameter, value) if is_tensor else None
        if shape is not None and shape != value.shape:
            places = torch.arange(shape.numel(), device="cpu") % max(1, value.numel())
            attributes[name] = value.detach().reshape(-1)[places].view(shape)
    return leaf_of(values, kind, attributes)


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


def shape_like(dimensions: int, which: int = 0) -> tuple[int, ...]:
    """Of a throw-away parameter of as many dimensions: one of three."""
    first, second, others = ((8, 4, 2), (12, 8, 4), (10, 6, 3))[which]
    return (first, second, *[others] * dimensions)[:dimensions]


def advance(step: Step, group: dict[str, Any], *, has_gradients: bool) -> set[str]:
    """Let ``group`` be as a step leaves it that some of its parameters took part in, or none; gives
    the keys that changed.
    """
    if not group["params"]:
        return set()
    position, model = max(enumerate(group["params"]), key=lambda found: found[1].dim())
    before = options_at(options_in(group), position)

    def options_after(which: int) -> dict[str, Any]:
        shape = shape_like(max(1, model.dim()), which)
        leaf = like(model, torch.zeros(shape, dtype=torch.float32, device="cpu"))
        leaf.grad = torch.ones_like(leaf) if has_gradients else None
        return step(leaf, {**options_at(options_in(group), position)}, {})[1]

    try:
        # Not of the shapes in trials, which so find what goes by them.
        after = options_after(2)
    except Exception:  # of an optimizer that takes no such shape
        after = options_after(0)
    changed = {key for key in after if key not in before or not same(before[key], after[key])}
    group.update({key: after[key] for key in changed})
    return changed


def plain_step(optimizer: torch.optim.Optimizer, within: Within = ThreadSettings.of_trials) -> None:
    """The step of the class of a worker, which has no hooks: see ``forget_hooks``."""
    step: Any = type(optimizer).step
    # Torch puts its own function around the step, which calls the hooks of all optimizers.
    hooked: Any = torch.optim.Optimizer.profile_hook_step
    of_torch = getattr(step, "__globals__", None) is hooked.__globals__
    if of_torch and step.__code__.co_name == "wrapper":
        step = step.__wrapped__
    with within():
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
