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

from collections.abc import Callable
from typing import Any

import torch

from infinity.optim.torch_optimizer.attributes import Attributes
from infinity.optim.torch_optimizer.kept_beside import REMEDY, check_kept, is_needed
from infinity.optim.torch_optimizer.trials import (
    COUNT,
    NOT_FINITE,
    SCALES,
    Alone,
    Together,
    small_groups,
)
from infinity.optim.torch_optimizer.workers import Step


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
    groups = small_groups(optimizer)
    try:
        check_kept(optimizer, lambda: Together(optimizer, attributes, groups, has_state=has_state))
        prepare()
        together = Together(optimizer, attributes, groups, has_state=has_state)
        alone = Alone(groups, trial, step)
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

    def make() -> Together:
        groups[:] = groups or small_groups(optimizer)
        return Together(optimizer, attributes, groups, has_state=has_state)

    for key in attributes.changed(lambda key: is_needed(make, key)):
        raise ValueError(
            f"the attribute {key!r} of {type(optimizer).__name__}, which its steps need, was "
            "changed since the block began, by a hook or by hand; updates of an offloaded model "
            "have attributes as they came: keep what changes in the groups (group['steps'] += 1)"
        )


def _take_steps(together: Together, alone: Alone) -> bool:
    """Whether both come to the same: in their first steps, in one that any period ends at, and with
    a gradient that is not finite.
    """
    for number in range(len(SCALES)):
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
        ahead = COUNT - 1 - max(counted.values()) + count
        for trial in (together, alone):
            trial.set_count(place, ahead)
    for number in range(len(SCALES), 1 + max(NOT_FINITE)):
        try:
            together.take(number)
        except Exception:  # a schedule that ends, or a check of gradients: no trial goes beyond
            return True
        alone.take(number)
        if not alone.is_like(together):
            return False
    return True


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"{type(optimizer).__name__} has a step that was set on it after it was made, which "
            "parameters that are updated one at a time would not go through; give a subclass that "
            "step, or put hooks on it (register_step_pre_hook)"
        )
