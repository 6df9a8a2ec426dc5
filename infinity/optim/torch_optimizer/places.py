"""Whether what an optimizer does to a parameter goes by where it is in its group, by a list that
the group has beside its parameters, or by its class: updates have each parameter alone. Found by
steps of throw-away parameters that are as many as those of the model, and of their classes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from infinity.optim.torch_optimizer.attributes import Attributes
from infinity.optim.torch_optimizer.trials import Groups, Together, same_gradients, whole_groups
from infinity.optim.torch_optimizer.values import same
from infinity.optim.torch_optimizer.workers import (
    Step,
    advance,
    kind_in_updates,
    like,
    options_at,
    options_in,
    values_of,
)

_STEPS = range(1, 3)
"""There are optimizers that move nothing in the first."""


def difference_of_places(
    optimizer: torch.optim.Optimizer,
    attributes: Attributes,
    trial: Step,
    step: Step,
    *,
    has_state: bool,
) -> str | None:
    """What makes updates of single parameters other ones than those of all; None if nothing does.

    ``trial`` and ``step`` are as for ``Alone``.
    """
    groups = whole_groups(optimizer)
    if not sum(len(group["params"]) for group in groups):
        return None
    together = Together(optimizer, attributes, groups, has_state=has_state)
    _step_all(together)
    alone = _Alone(groups, trial, step)
    if alone.is_like(together):
        return None
    kinds = {type(leaf) for leaf in together.leaves}
    if others := [kind for kind in kinds if kind_in_updates(kind) is not kind]:
        plain = [
            group | {"params": [like(p, values_of(p)) for p in group["params"]]} for group in groups
        ]
        without = Together(optimizer, attributes, plain, has_state=has_state)
        _step_all(without)
        if alone.is_like(without):
            names = ", ".join(sorted(kind.__name__ for kind in others))
            return (
                f"what it does to a parameter goes by its class ({names}), which updates do not "
                "have: let it go by an attribute of the parameter (p.is_special = True)"
            )
    return (
        "what it does to a parameter goes by its place in its group, by a list that the group has "
        "beside 'params', or by how many there are: make a group for each kind, or give the value "
        "as an attribute of the parameter (p.lr_scale = 0.1)"
    )


def _step_all(together: Together) -> None:
    for number in _STEPS:
        together.step(same_gradients(together.groups, number))


class _Alone:
    """What becomes of each parameter in updates of its own. Those of one group that have as many
    dimensions are expected to come to the same, so one is tried for all.
    """

    def __init__(self, groups: Groups, trial: Step, step: Step) -> None:
        self._groups = groups
        self._trial = trial
        self._options: list[list[dict[str, Any]]] = []
        """Of each group, before each step and after the last."""
        for group in groups:
            one = options_in(group) | {"params": group["params"]}
            self._options.append([options_in(one)])
            for _ in _STEPS:
                advance(step, one, has_gradients=True)
                self._options[-1].append(options_in(one))

    def is_like(self, together: Together) -> bool:
        for at, group in enumerate(together.groups):
            if not group["params"]:
                continue
            if not same(options_in(group), self._options[at][-1]):
                return False
            found: dict[int, torch.Tensor] = {}
            for position, leaf in enumerate(group["params"]):
                values = values_of(leaf)
                if leaf.dim() not in found:
                    found[leaf.dim()] = self._after(at, position)
                if same(values, found[leaf.dim()]):
                    continue
                if not same(values, self._after(at, position)):
                    return False
        return True

    def _after(self, at: int, position: int) -> torch.Tensor:
        """The parameter at ``position`` of a group after the steps."""
        original = self._groups[at]["params"][position]
        leaf = like(original, values_of(original).clone(), kind_in_updates(type(original)))
        state: dict[str, Any] = defaultdict(dict)
        for number, options in zip(_STEPS, self._options[at], strict=False):
            (gradient,) = same_gradients([{"params": [leaf]}], number)[0]
            leaf.grad = gradient
            own = copy.deepcopy({**options_at(options, position)})
            after, _ = self._trial(leaf, own, dict(state))
            state = dict(after)
        return values_of(leaf)
