"""Whether an optimizer updates every parameter by itself, as an offloaded model needs it, and what
it keeps of all of them in its groups.

What a group holds may change with every step (a count of steps, a weight of averages) as long as
that does not depend on gradients: it is carried on with a throw-away parameter. What an optimizer
keeps beside groups and state is looked at in ``kept_beside``. Everything else that parameters have
in common (a norm over all, a rate estimated from all) is looked for by a trial: steps of several
small parameters together must give the bits of the same steps with each one alone. There are three
first steps, in one of which some parameters have no gradient; then all counts of steps are set
ahead to one that most periods end at; then a gradient is infinite, and NaN. What shows neither in
these steps nor beside groups and state is not found: a period or a bound of the optimizer's own
that none of them comes to (step 500 alone), values outside of it (a closure, a global, its class).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.optim.attributes import Absent, Attributes
from infinity.optim.kept_beside import REMEDY, check_kept, is_needed
from infinity.optim.values import same
from infinity.parameters.becoming import attributes_of

Step = Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]]
"""A step of one parameter, by group options and state: the state after it, and the options."""

_SCALES = (30.0, 0.01, 1.0)
"""Of gradients in the trial: with norms above and below what optimizers clip to."""
_COUNT = 2_520_000
"""Of steps, that most periods of round numbers end at: a multiple of all numbers up to ten, of 100
and of 1000.
"""
_NOT_FINITE = {5: math.inf, 6: math.nan}
"""The numbers of steps in which one gradient is not finite."""
_WITHOUT = {1: 0, 4: 1}
"""Not every parameter has a gradient in every step: which of a group's has none, by step."""
Place = tuple[int, int | None, str]
"""A group; a parameter in it, or None for the group itself; the name of a value there."""


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


def check_separable(
    optimizer: torch.optim.Optimizer,
    attributes: Attributes,
    trial: Step,
    step: Step,
    prepare: Callable[[], object],
    *,
    has_state: bool,
) -> set[str]:
    """Raise ``ValueError`` for an optimizer of which parameters cannot be updated one at a time;
    gives the keys of groups that its steps change.

    ``trial`` updates a parameter as it is done at home, which ``prepare`` makes ready; ``step``
    says what becomes of options.
    """
    name = type(optimizer).__name__
    _check_step(optimizer)
    if all(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        raise ValueError(
            f"{name} has train() and eval(), which change all weights between steps (schedule-free "
            "optimizers do); weights of an offloaded model change in step() alone, "
            f"{REMEDY}"
        )
    groups = _small_groups(optimizer)
    try:
        check_kept(optimizer, lambda: _Together(optimizer, attributes, groups, has_state=has_state))
        prepare()
        together = _Together(optimizer, attributes, groups, has_state=has_state)
        alone = _Alone(groups, trial, step)
        is_separable = _take_steps(together, alone)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{name} cannot take a step with dense gradients and without a closure "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    if not is_separable:
        raise ValueError(
            f"{name} does not update every parameter by itself: two of them together become "
            "something else than each of them alone (through a norm over all of them, say, a test "
            "that all of them are finite, or what it keeps in a group); an offloaded "
            f"model is updated one parameter at a time, {REMEDY}"
        )
    return alone.changed


def check_unchanged(
    optimizer: torch.optim.Optimizer, attributes: Attributes, *, has_state: bool
) -> None:
    """Raise ``ValueError`` naming an attribute that was changed since the optimizer was made, by a
    hook or by hand, if steps need it.
    """
    groups: list[dict[str, Any]] = []

    def make() -> _Together:
        groups[:] = groups or _small_groups(optimizer)
        return _Together(optimizer, attributes, groups, has_state=has_state)

    for key in attributes.changed(lambda key: is_needed(make, key)):
        raise ValueError(
            f"the attribute {key!r} of {type(optimizer).__name__}, which its steps need, was changed "
            "since the block began, by a hook or by hand; updates of an offloaded model have "
            "attributes as they came: keep what changes in the groups (group['steps'] += 1)"
        )


def _take_steps(together: _Together, alone: _Alone) -> bool:
    """Whether both come to the same: in their first steps, in one that any period ends at, and with
    a gradient that is not finite.
    """
    for number in range(len(_SCALES)):
        counts = together.counts()
        for trial in (together, alone):
            trial.take(number)
    if not alone.is_like(together):
        return False
    counted = {
        place: count + 1
        for place, count in together.counts().items()
        if counts.get(place) == count - 1
    }
    for place, count in counted.items():
        ahead = _COUNT - 1 - max(counted.values()) + count
        for trial in (together, alone):
            trial.set_count(place, ahead)
    for number in range(len(_SCALES), 1 + max(_NOT_FINITE)):
        try:
            together.take(number)
        except Exception:  # a schedule that ends, or a check of gradients: no trial goes beyond
            return True
        alone.take(number)
        if not alone.is_like(together):
            return False
    return True


class _Together:
    """The optimizer as it is, with throw-away parameters in the places of all that it has."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        attributes: Attributes,
        groups: list[dict[str, Any]],
        *,
        has_state: bool,
    ) -> None:
        memo: dict[int, Any] = {}
        self.groups = []
        for group in groups:
            leaves = [like(leaf, leaf.detach().clone()) for leaf in group["params"]]
            self.groups.append(options_in(group, memo) | {"params": leaves})
        self.worker = object.__new__(type(optimizer))
        self.absent: Mapping[str, Absent] = {key: Absent() for key in attributes.absent}
        vars(self.worker).update(attributes.copies(self.worker, memo) | self.absent)
        forget_hooks(self.worker)
        self.worker.param_groups = self.groups
        self.worker.state = defaultdict(dict)
        if has_state:
            make: Any = type(optimizer)
            again = [options_in(group) | {"params": group["params"]} for group in self.groups]
            self.worker.state = make(again, **optimizer.defaults).state

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for group in self.groups for leaf in group["params"]]

    def take(self, number: int) -> None:
        for group, found in zip(self.groups, _gradients(self.groups, number), strict=True):
            for leaf, gradient in zip(group["params"], found, strict=True):
                leaf.grad = gradient
        plain_step(self.worker)

    def counts(self) -> dict[Place, int]:
        """All whole numbers that it keeps."""
        return {
            (at, position, key): count
            for at, group in enumerate(self.groups)
            for position, kept in [(None, group), *enumerate(map(self._state, group["params"]))]
            for key, value in kept.items()
            if (count := _whole(value)) is not None
        }

    def set_count(self, place: Place, count: int) -> None:
        at, position, key = place
        group = self.groups[at]
        kept = group if position is None else self._state(group["params"][position])
        kept[key] = _with_count(kept[key], count)

    def _state(self, leaf: torch.Tensor) -> dict[str, Any]:
        kept: dict[str, Any] = self.worker.state.get(leaf, {})
        return kept


class _Alone:
    """Each parameter in a step of its own, as ``TorchRule`` has it."""

    def __init__(self, groups: list[dict[str, Any]], trial: Step, step: Step) -> None:
        self._trial = trial
        self._step = step
        self._groups = groups
        self._states: dict[int, dict[str, Any]] = defaultdict(dict)
        self.changed: set[str] = set()

    def take(self, number: int) -> None:
        for group, found in zip(self._groups, _gradients(self._groups, number), strict=True):
            options = options_in(group)
            for position, leaf in enumerate(group["params"]):
                gradient = found[position]
                if gradient is None:
                    continue
                leaf.grad = gradient
                own = copy.deepcopy({**options_at(options, position)})
                state, _ = self._trial(leaf, own, self._states[id(leaf)])
                self._states[id(leaf)] = dict(state)
            has_gradients = any(gradient is not None for gradient in found)
            self.changed |= advance(self._step, group, has_gradients=has_gradients)

    def set_count(self, place: Place, count: int) -> None:
        at, position, key = place
        kept = self._groups[at]
        if position is not None:
            kept = self._states[id(kept["params"][position])].get("small", {})
        if key in kept:
            kept[key] = _with_count(kept[key], count)

    def is_like(self, other: _Together) -> bool:
        for ours, theirs in zip(self._groups, other.groups, strict=True):
            if not ours["params"]:
                continue  # whatever it keeps is for nothing
            if not all(map(same, ours["params"], theirs["params"])):
                return False
            if not same(options_in(ours), options_in(theirs)):
                return False
        return True


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


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"{type(optimizer).__name__} has a step that was set on it after it was made, which "
            "parameters that are updated one at a time would not go through; give a subclass that "
            "step, or put hooks on it (register_step_pre_hook)"
        )


def _small_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    memo: dict[int, Any] = {}
    return [_small_group(group, memo) for group in optimizer.param_groups]


def _small_group(group: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """With two throw-away parameters for each number of dimensions in it."""
    rng = torch.Generator().manual_seed(1)
    parameters = group["params"]
    by_dimensions: dict[int, list[int]] = defaultdict(list)
    for position, parameter in enumerate(parameters):
        by_dimensions[max(1, parameter.dim())].append(position)
    chosen = [
        at for d in sorted(by_dimensions) for at in (by_dimensions[d][0], by_dimensions[d][-1])
    ]
    leaves = []
    for at in chosen:
        shape = shape_like(max(1, parameters[at].dim()))
        leaves.append(like(parameters[at], _randn(shape, rng)))
    small = options_in(group, memo) | {"params": leaves}
    if small.get("param_names") is not None:
        small["param_names"] = [small["param_names"][at] for at in chosen]
    return small


def _gradients(groups: Sequence[Mapping[str, Any]], number: int) -> list[list[torch.Tensor | None]]:
    """Those of the parameters in each group for the step of that number."""
    rng = torch.Generator().manual_seed(number)
    found: list[list[torch.Tensor | None]] = []
    for group in groups:
        scale = _SCALES[number % len(_SCALES)]
        gradients = [scale * _randn(leaf.shape, rng) for leaf in group["params"]]
        if gradients and not any(map(len, found)) and number in _NOT_FINITE:
            gradients[0].view(-1)[0] = _NOT_FINITE[number]
        without = _WITHOUT.get(number)
        if without is not None:  # a group may be empty
            found.append([*gradients])
            found[-1][without : without + 1] = [None] * len(gradients[:1])
        else:
            found.append([*gradients])
    return found


def _whole(value: Any) -> int | None:
    """``value`` as the whole number that it is; None if it is none."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and value.dtype in _WHOLE_IN
        return _whole(value.item()) if is_one else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and math.isfinite(value) and value == int(value) else None


_WHOLE_IN = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What has place for a large count."""


def _with_count(value: Any, count: int) -> Any:
    return value.fill_(count) if isinstance(value, torch.Tensor) else type(value)(count)


def _randn(shape: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
