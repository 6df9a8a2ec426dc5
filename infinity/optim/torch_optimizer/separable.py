"""Whether an optimizer updates every parameter by itself, as an offloaded model needs it, and what
it keeps of all of them in its groups.

What a group holds may change with every step (a count of steps, a weight of averages) as long as
that does not depend on gradients: it is carried on with a throw-away parameter. What an optimizer
keeps beside groups and state is looked at in ``kept_beside``, what goes by the place of a parameter
in ``places``. Everything else that parameters have in common (a norm over all, a rate estimated
from all) is looked for by a trial: steps of several small parameters together must give the bits of
the same steps with each one alone. There are three first steps, in one of which some parameters
have no gradient, and in the last of which options are other ones, as schedulers make them; then all
counts of steps are set ahead to one that most periods end at; then a gradient is infinite, and NaN.
What shows neither in these steps nor beside groups and state is not found: a period or a bound of
the optimizer's own that none of them comes to (step 500 alone), values outside of it (a closure, a
global).

Trials leave nothing: not in the optimizer and its class, not in what updates have of it, not in
random states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from infinity.optim.torch_optimizer.attributes import Attributes, values_in, ways_to_parameters
from infinity.optim.torch_optimizer.kept_beside import REMEDY, check_kept, is_needed
from infinity.optim.torch_optimizer.places import difference_of_places
from infinity.optim.torch_optimizer.trials import (
    COUNT,
    NOT_FINITE,
    SCALES,
    Alone,
    Groups,
    Together,
    gradients_for,
    small_groups,
    vary,
)
from infinity.optim.torch_optimizer.values import copied, same
from infinity.optim.torch_optimizer.workers import Step, has_own, is_of_torch, options_in


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
    _check_methods(optimizer)
    _check_ways(optimizer)
    trials = _Trials(optimizer, attributes, trial, step, has_state)
    try:
        with random_states() as are_same, class_as_it_is(type(optimizer)) as changed_in_class:
            trials.find_variation()
            kept = check_kept(optimizer, trials.make, trials.varied, trials.varied_options)
            attributes.are_changed_by_steps(kept)
            prepare()
            changed = trials.changed_groups()
            difference = None if changed is not None else _what_differs(trials, kept)
            if difference is None and not is_of_torch(type(optimizer)):
                difference = difference_of_places(
                    optimizer, attributes, trial, step, has_state=has_state
                )
            if not are_same() and trials.draw():
                difference = _DRAWS
            if names := changed_in_class():
                difference = (
                    f"its steps set {', '.join(names)} in its class, where each update finds what "
                    "the one before it left"
                )
    except ValueError:
        raise
    except Exception as error:  # whatever the steps of somebody's optimizer raise
        raise ValueError(
            f"{name} cannot take a step with dense gradients and without a closure "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    finally:
        attributes.forget_trials()
    if difference is not None or changed is None:
        raise ValueError(
            f"{name} does not update every parameter by itself: {difference}; an offloaded "
            f"model is updated one parameter at a time, {REMEDY}"
        )
    return changed


@dataclass(slots=True)
class _Trials:
    """Trials of one optimizer; each is of parameters of its own."""

    optimizer: torch.optim.Optimizer
    attributes: Attributes
    trial: Step
    step: Step
    has_state: bool
    shapes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1), (2, 0)])
    """Those of the first trial, and those of a varied one."""
    varies: bool = True
    """Whether options can be other ones."""

    def find_variation(self) -> None:
        """Let trials be as different as steps can be taken; raises what the plainest one raises."""
        for shapes in ([(0, 1), (2, 0)], [(0, 0), (0, 0)]):
            self.shapes = shapes
            for self.varies in (True, False):
                with suppress(Exception):
                    for trial in (self.make(), self.varied()):
                        for number in range(2):
                            trial.take(number)
                    return

    def draw(self) -> bool:
        """Whether steps draw random numbers; those before may have been drawn by another thread."""
        for _ in range(2):
            trial = self.make()
            with random_states() as are_same:
                for number in range(2):
                    trial.take(number)
                if are_same():
                    return False
        return True

    def make(self) -> Together:
        return self._together(small_groups(self.optimizer, shapes=self.shapes[0]))

    def varied(self) -> Together:
        return self._together(
            small_groups(self.optimizer, shapes=self.shapes[1], varies=self.varies)
        )

    def varied_options(self) -> Together:
        return self._together(
            small_groups(self.optimizer, shapes=self.shapes[0], varies=self.varies)
        )

    def _together(self, groups: Groups) -> Together:
        return Together(self.optimizer, self.attributes, groups, has_state=self.has_state)

    def changed_groups(
        self, *, for_all: bool = False, only: slice = slice(None)
    ) -> set[str] | None:
        """The keys of groups that steps change; None if parameters come to something else together
        than alone. ``for_all``: in steps in which all have a gradient; ``only``: of these groups.
        """
        together = self._together(small_groups(self.optimizer, shapes=self.shapes[0])[only])
        groups = small_groups(self.optimizer, shapes=self.shapes[0])[only]
        alone = Alone(groups, self.trial, self.step)
        is_separable = _take_steps(together, alone, varies=self.varies, for_all=for_all)
        return alone.changed if is_separable else None


def _what_differs(trials: _Trials, kept: set[str]) -> str:
    if _moves_without_gradient(trials.make()) and trials.changed_groups(for_all=True) is not None:
        return (
            "it moves parameters that have no gradient, or changes their state; let it skip them "
            "(`if p.grad is None: continue`)"
        )
    if _goes_by_another_group(trials):
        return (
            "what becomes of a parameter goes by another group than its own, or by which one that "
            "is (`zip(self.param_groups, self.rates)`); let each group have what it needs among "
            "its options"
        )
    hint = ""
    if kept:
        names = ", ".join(map(repr, sorted(kept)))
        hint = (
            f"; its steps set {names}, which each update finds as it was made: let nothing go by "
            "that (make the state of a parameter where it has none)"
        )
    return (
        "two of them together become something else than each of them alone (through a norm over "
        "all of them, say, a test that all of them are finite, or what it keeps in a group)" + hint
    )


def _goes_by_another_group(trials: _Trials) -> bool:
    """Whether each of several groups comes to the same together as alone where it is the only one;
    those of one parameter may also go by something over all parameters.
    """
    groups = trials.optimizer.param_groups
    has_peers = len(groups) > 1 and any(len(group["params"]) > 1 for group in groups)
    with suppress(Exception):  # of an optimizer that takes no fewer groups
        return has_peers and all(
            trials.changed_groups(only=slice(at, at + 1)) is not None for at in range(len(groups))
        )
    return False


def _moves_without_gradient(trial: Together) -> bool:
    """Whether a step changes a parameter that has no gradient in it, or the state of one."""
    leaves = trial.leaves
    for number in range(len(SCALES)):
        before = [(leaf.detach().clone(), copied(trial.state_of(leaf), {})) for leaf in leaves]
        gradients = gradients_for(trial.groups, number)
        has_none = [gradient is None for found in gradients for gradient in found]
        trial.step(gradients)
        for leaf, (values, state), is_without in zip(leaves, before, has_none, strict=True):
            if is_without and not (same(leaf, values) and same(trial.state_of(leaf), state)):
                return True
    return False


_DRAWS = (
    "it draws random numbers in its steps, and updates of single parameters, which come in another "
    "order and beside the next forward pass, would draw others; let it use a torch.Generator that "
    "it seeds anew for each parameter"
)


@contextmanager
def random_states() -> Iterator[Callable[[], bool]]:
    """They are the same afterwards; what is given says whether they are."""
    before: Any = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def are_same() -> bool:
        now: Any = np.random.get_state()
        return (
            random.getstate() == before[0]
            and bool(now[2] == before[1][2] and (now[1] == before[1][1]).all())
            and torch.equal(before[2], torch.get_rng_state())
        )

    try:
        yield are_same
    finally:
        if not are_same():
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


@contextmanager
def class_as_it_is(kind: type) -> Iterator[Callable[[], list[str]]]:
    """Values in ``kind`` are the same afterwards; what is given names those that are not."""
    bases = [base for base in kind.__mro__ if base is not object and not is_of_torch(base)]
    before = {base: _values_in(base) for base in bases}

    def changed() -> list[str]:
        return [repr(key) for base in bases for key in _differing(before[base], vars(base))]

    try:
        yield changed
    finally:
        for base in bases:
            for key in _differing(before[base], vars(base)):
                setattr(base, key, before[base][key])


def _values_in(kind: type) -> dict[str, Any]:
    return {key: copied(value, {}) for key, value in values_in(kind).items()}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key, value in before.items() if not same(value, now.get(key))]


def check_no_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` if something was called on ``optimizer``, made by a factory, that left
    state there: no update has that.
    """
    if any(optimizer.state.values()):
        raise ValueError(
            f"the {type(optimizer).__name__} that the factory made has state of its own, left by a "
            "call of its step() or of another of its methods; updates of an offloaded model do not "
            "have it, and it is not saved: call offloaded.step() alone, and let the optimizer's "
            "step do what other methods did"
        )


def check_unchanged(
    optimizer: torch.optim.Optimizer, attributes: Attributes, *, has_state: bool
) -> None:
    """Raise ``ValueError`` naming an attribute that was changed since the optimizer was made, by a
    hook or by hand, if steps need it.
    """
    groups: Groups = []

    def make() -> Together:
        groups[:] = groups or small_groups(optimizer)
        return Together(optimizer, attributes, groups, has_state=has_state)

    for key in attributes.changed(lambda key: is_needed(make, key)):
        raise ValueError(
            f"the attribute {key!r} of {type(optimizer).__name__}, which its steps need, was "
            "changed since the block began, by a hook or by hand; updates of an offloaded model "
            "have attributes as they came: keep what changes in the groups (group['steps'] += 1)"
        )


def _take_steps(together: Together, alone: Alone, *, varies: bool, for_all: bool) -> bool:
    """Whether both come to the same: in their first steps, in one that any period ends at, and with
    a gradient that is not finite. ``varies``: options become other ones, unless steps count there.
    """
    made = [options_in(group) for group in together.groups]

    def take(trial: Together | Alone, number: int) -> None:
        trial.step(gradients_for(trial.groups, number, for_all=for_all))

    for number in range(len(SCALES)):
        counts = together.counts()
        for trial in (together, alone):
            if varies and number == len(SCALES) - 1:
                vary(trial.groups, made)
            take(trial, number)
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
            take(together, number)
        except Exception:  # a schedule that ends, or a check of gradients: no trial goes beyond
            return True
        take(alone, number)
        if not alone.is_like(together):
            return False
    return True


def _check_ways(optimizer: torch.optim.Optimizer) -> None:
    for place in ways_to_parameters(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} does not update every parameter by itself: {place} has "
            "parameters, or what leads to them (their id(), a module), in it, and what is updated "
            "is another object; let what tells parameters apart be an attribute of the parameter "
            "(p.lr_scale = 0.1)"
        )


def _check_methods(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"{name} has a step that was set on it after it was made, which "
            "parameters that are updated one at a time would not go through; give a subclass that "
            "step, or put hooks on it (register_step_pre_hook)"
        )
    if has_own(optimizer, "zero_grad"):
        raise ValueError(
            f"{name} has a zero_grad() of its own, and offloaded.optimizer.zero_grad() clears "
            "gradients and does nothing else; let step() do what it does, at its end"
        )
    if all(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        raise ValueError(
            f"{name} has train() and eval(), which change all weights between steps (schedule-free "
            "optimizers do); weights of an offloaded model change in step() alone, "
            f"{REMEDY}"
        )
