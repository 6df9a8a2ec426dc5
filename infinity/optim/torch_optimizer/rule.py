"""The rule by which any ``torch.optim.Optimizer`` updates staged tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from infinity.optim import adamw
from infinity.optim.rule import UNNAMED, OptimizerRule, SavedState, last_name
from infinity.optim.thread_settings import ThreadSettings, Within
from infinity.optim.torch_optimizer.attributes import Attributes
from infinity.optim.torch_optimizer.probing import check_made_state, probe
from infinity.optim.torch_optimizer.separable import (
    check_no_state,
    check_separable,
    check_unchanged,
)
from infinity.optim.torch_optimizer.state import IN_COMPONENTS, StateComponents
from infinity.optim.torch_optimizer.workers import (
    advance,
    forget_hooks,
    kind_in_updates,
    leaf_of,
    like,
    options_at,
    options_in,
    plain_step,
)
from swap.masters import keep_master, master_of
from swap.plain import copy_together
from swap.plan.layout import Component, Segment
from swap.plan.rules import ParameterUpdate, master_components


class TorchRule(OptimizerRule):
    """Runs any ``torch.optim.Optimizer`` on whole parameters, in float32 on the CPU.

    The optimizer is given one parameter at a time as a float32 leaf with its attributes and its
    state; state tensors of the parameter's shape become components of their dtype, anything else
    (step counts, factored moments) stays in memory in ``small_state``, see ``state_components``;
    what it keeps in its groups is carried on by ``advance``. Optimizers that look at several
    parameters at once, or need a closure, cannot work this way: they are a ``ValueError``, see
    ``separable``.
    """

    whole_parameters = True
    is_repeatable = False
    kept_by: str

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer).__name__ == "LBFGS":
            raise ValueError(
                "LBFGS looks at all parameters at once and cannot be offloaded; use "
                "infinity.AdamW(...) or another optimizer of torch.optim"
            )
        self._optimizer = optimizer
        self._starts_with_state = check_made_state(optimizer)
        optimizer.state.clear()
        kind = type(optimizer)
        self.kept_by = f"{kind.__module__}.{kind.__qualname__}"
        self._components: dict[torch.dtype, StateComponents] = {}
        self._made = [options_in(group) for group in optimizer.param_groups]
        self._attributes = Attributes(optimizer)
        self._within: Within = ThreadSettings.of_trials
        self.group_keys = check_separable(
            optimizer,
            self._attributes,
            self._trial,
            self._step_options,
            partial(self.state_components, torch.float32),
            has_state=self._starts_with_state,
        )
        """What steps change in the groups, for all of its parameters."""
        widths = [
            component.dtype.itemsize
            for component in self.state_components(torch.float32).components
        ]
        self.scratch_bytes_per_element = 4 * max([4, *widths])
        self._small: dict[int, dict[str, Any]] = defaultdict(dict)
        self._before: dict[int, tuple[int, dict[str, Any]]] = {}

    @property
    def small_state(self) -> Mapping[int, Mapping[str, Any]]:
        return self._small

    def forget_state(self, groups: Iterable[dict[str, Any]]) -> None:
        self._small.clear()
        self._before.clear()
        for group, made in zip(groups, self._made, strict=False):  # there may be more by now
            for key in self.group_keys:
                group.pop(key, None)
            group.update(copy.deepcopy({key: made[key] for key in self.group_keys & made.keys()}))

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        return (*master_components(dtype), *self.state_components(dtype).components)

    def state_components(self, dtype: torch.dtype) -> StateComponents:
        """Of parameters with weights of ``dtype``."""
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        if kind not in self._components:
            self._components[kind] = probe(self._optimizer, self._step_one, kind)
            self._attributes.forget_trials()
        return self._components[kind]

    def advance(self, groups: Iterable[dict[str, Any]], stepped: Iterable[torch.Tensor]) -> None:
        if self.group_keys:
            taken = {id(parameter) for parameter in stepped}
            for group in groups:
                has_gradients = any(id(parameter) in taken for parameter in group["params"])
                advance(self._step_options, group, has_gradients=has_gradients)

    def check_step(self) -> None:
        check_no_state(self._optimizer)
        check_unchanged(self._optimizer, self._attributes, has_state=self._starts_with_state)
        self._within = ThreadSettings.here().set

    def check_saving(self) -> None:
        check_no_state(self._optimizer)

    def check(self, update: ParameterUpdate) -> None:
        """Optimizers of torch look at their options when they are made, and not again."""

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        master = master_of(components)
        scaled = (gradient.to(master.dtype) * gradient_scale).view(update.shape)
        self._apply(master, scaled, update, components, self._small_state_before(update))
        keep_master(master, components)

    def _apply(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        small: dict[str, Any],
    ) -> None:
        leaf = leaf_of(master.view(update.shape), update.kind, update.attributes)
        leaf.grad = gradient
        kept = self.state_components(master.dtype)
        state = kept.state(small, components, leaf.detach())
        # A step may count in what a group holds, and that of all its parameters is one.
        options = copy.deepcopy(dict(update.options))
        after = self._step_one(leaf, options, state, update.within)
        moves = kept.keep(dict(after), components, small, leaf.detach())
        # The optimizer may have put other data in its place, those of the state too.
        copy_together([*moves, (master, leaf.detach())])

    def _small_state_before(self, update: ParameterUpdate) -> dict[str, Any]:
        """The small state that ``update`` starts from, also when it is computed a second time."""
        step, before = self._before.get(update.parameter, (0, {}))
        if step == update.step:
            self._small[update.parameter] = copy.deepcopy(before)
        else:
            before = copy.deepcopy(self._small[update.parameter])
            self._before[update.parameter] = (update.step, before)
        return self._small[update.parameter]

    def _step_one(
        self,
        leaf: torch.Tensor,
        options: dict[str, Any],
        state: dict[str, Any],
        within: Within = ThreadSettings.of_trials,
    ) -> Mapping[str, Any]:
        # Not copy.copy: optimizers leave attributes of their own out of what they pickle.
        worker = object.__new__(type(self._optimizer))
        self._attributes.give(worker)
        forget_hooks(worker)
        worker.param_groups = [options | {"params": [leaf]}]
        worker.state = defaultdict(dict)
        if state:
            worker.state[leaf] = state
        elif self._starts_with_state:
            # What it made when it was made was for all parameters at once, and is gone.
            make: Any = type(worker)
            worker.state = make([options | {"params": [leaf]}], **worker.defaults).state
        plain_step(worker, within)
        result: Mapping[str, Any] = worker.state[leaf]
        options.update({k: v for k, v in worker.param_groups[0].items() if k != "params"})
        return result

    def _step_options(
        self, leaf: torch.Tensor, options: dict[str, Any], state: dict[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        return self._step_one(leaf, options, state, self._within), options

    def _trial(
        self, leaf: torch.Tensor, options: dict[str, Any], state: dict[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """``apply``, with ``state`` in components of its own."""
        master = leaf.detach().clone().view(-1)
        if not state:
            state = {
                component.name: torch.zeros(len(master), dtype=component.dtype, device="cpu")
                for component in self.state_components(master.dtype).components
            }
            state["small"] = {}
        update = ParameterUpdate(
            parameter=-1,
            step=1,
            shape=leaf.shape,
            options=options,
            attributes=vars(leaf),
            kind=type(leaf),
            within=ThreadSettings.of_trials,
        )
        assert leaf.grad is not None
        components = {name: value for name, value in state.items() if name != "small"}
        self._apply(master, leaf.grad, update, components, state["small"])
        leaf.detach().view(-1).copy_(master)
        return state, options

    def check_slices(self) -> None:
        """Raise ``ValueError`` for an optimizer that does not treat every element by itself: rows
        of a parameter must be updated alone as they are in the whole.
        """
        rng = torch.Generator().manual_seed(0)
        kind: Any = {"generator": rng, "dtype": torch.float32, "device": "cpu"}
        first, gradients = torch.randn(8, 4, **kind), torch.randn(2, 8, 4, **kind)
        for group in self._optimizer.param_groups:
            after = partial(self._after, options_at(options_in(group), 0), group["params"][0])
            whole = after(first, gradients)
            halves = [
                after(first[rows].reshape(-1), gradients[:, rows].reshape(2, -1))
                for rows in (slice(0, 3), slice(3, 8))
            ]
            if not torch.equal(whole.reshape(-1), torch.cat(halves)):
                raise ValueError(
                    f"{type(self._optimizer).__name__} looks at more than one element of a "
                    "parameter at once, and each rank has a slice of every parameter; over several "
                    "ranks use infinity.AdamW, another optimizer that treats elements by "
                    "themselves, or the optimizer itself under FSDP2"
                )

    def reads(self, kept_by: str, groups: Sequence[Mapping[str, Any]]) -> bool:
        if kept_by.startswith(_OURS):
            return kept_by == adamw.NAME and adamw.is_torch_adamw(self.kept_by)
        return kept_by == UNNAMED or last_name(kept_by) == last_name(self.kept_by)

    def check_options(self, kept_by: str, options: Mapping[str, Any]) -> None:
        if kept_by == adamw.NAME:
            adamw.check_options(options)

    def check_saved(self, saved: SavedState) -> None:
        super().check_saved(saved)
        adamw.check_moments(saved, self.state_dtype)

    def steps(self, saved: SavedState) -> int:
        return adamw.steps_of_moments(saved)

    def restore(
        self, index: int, dtype: torch.dtype, saved: SavedState, small: Mapping[str, Any]
    ) -> None:
        if saved.kept_by == adamw.NAME:
            # As torch makes it: a count of its own for each parameter.
            step = torch.tensor(float(saved.steps), dtype=torch.float32, device="cpu")
            self._small[index] = {"step": step, IN_COMPONENTS: [*adamw.MOMENTS]}
            return
        self._small[index] = self.state_components(dtype).restore(small, saved.components)

    def _after(
        self,
        options: Mapping[str, Any],
        parameter: torch.Tensor,
        first: torch.Tensor,
        gradients: torch.Tensor,
    ) -> torch.Tensor:
        """A throw-away parameter like ``parameter`` after a step for each of ``gradients``."""
        leaf = like(parameter, first.clone(), kind_in_updates(type(parameter)))
        state: Mapping[str, Any] = {}
        for gradient in gradients:
            leaf.grad = gradient.clone()
            state = self._step_one(leaf, dict(options), dict(state))
        return leaf.detach()


_OURS = "infinity."
"""Begins what checkpoints call the optimizers of ours, whose state means something else."""
