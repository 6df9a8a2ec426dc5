"""What an optimizer is to the rest of the library. Each has a module of its own beside this one,
and nothing outside of this folder asks which of them it has.

``OptimizerRule`` carries out updates, and is what plans, tiers, steps and checkpoints are given.
``NativeOptimizer`` holds the options that users give for an optimizer of ours, and makes the rule.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.parameters.records import Record
from swap.kernels import copy_values
from swap.plan.layout import Component, Segment
from swap.plan.rules import ParameterUpdate, UpdateRule

UNNAMED = "an optimizer made by a factory"
"""Stands for the class of an optimizer where a checkpoint does not name it."""
OF_MEMBERS = ("params", "param_names")
"""What a group has of each member by its position, and so is never that of another group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint says of the optimizer state of one parameter, and what is kept of it here.

    Components are those of the state alone, without weights and masters.
    """

    path: str | os.PathLike[str]
    name: str
    kept_by: str
    """``OptimizerRule.kept_by`` of the rule whose state it is."""
    steps: int
    components: Sequence[str]
    dtypes: Mapping[str, torch.dtype]
    """Of the components, where the checkpoint says so, see ``OptimizerRule.names_dtypes``."""
    state_dtype: torch.dtype
    """``OptimizerRule.state_dtype`` of the rule whose state it is."""
    is_converted: bool
    """Whether the weights were saved in another dtype than they have here."""
    is_tiled_alike: bool
    is_trained: bool
    """Whether it is trained here."""
    here: Mapping[str, torch.dtype]
    """The components that are kept here."""
    has_blocks: bool
    """Whether one of those has a value for several elements."""


class OptimizerRule(UpdateRule):
    """An update, and what is to be known of its state. Optimizers derive from this: what has an
    answer here is right for one that keeps all state in components and treats elements by
    themselves.
    """

    whole_parameters: bool = False
    scratch_bytes_per_element: int = 0
    updates_on_device: bool = False
    takes_steps: bool = True

    kept_by: str | None
    """What a checkpoint calls the optimizer whose state it has: ``infinity.`` and its name, or the
    full name of a class of others. None: there is no optimizer, and no step.
    """

    is_repeatable: bool = True
    """Whether updates depend on their arguments alone. They may be carried out speculatively,
    before the step, and rolled back.
    """

    options_read: frozenset[str] | None = None
    """Names of all options that updates look at; None: whatever there are. What else a group has is
    the program's, and may be of any kind.
    """

    names_dtypes: bool = True
    """Whether checkpoints name the dtype of each component. (Those of AdamW have one for all, see
    ``state_dtype``.)
    """

    state_dtype: torch.dtype = torch.float32
    """What checkpoints say that moments are kept in."""

    def apply_aside(
        self,
        segment: Segment,
        update: ParameterUpdate,
        old: Mapping[str, torch.Tensor],
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        """A kernel that does both at once takes less of the memory's bandwidth."""
        for name, values in components.items():
            copy_values(old[name], values)
        self.apply(segment, update, components, gradient, gradient_scale)

    def apply_on_device(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        raise AssertionError("nothing that is updated in host memory alone is put on a device")

    @property
    def small_state(self) -> Mapping[int, Mapping[str, Any]]:
        """State of parameters that is in memory instead of components, for checkpoints."""
        return {}

    def check_slices(self) -> None:
        """Raises ``ValueError`` unless slices of a parameter may be updated each by itself."""

    def check_step(self) -> None:
        """Raise ``ValueError`` for what has changed since the block began and updates do not have,
        before a step is taken.
        """

    def check_saving(self) -> None:
        """Raise ``ValueError`` for state that what is saved now would not have."""

    def advance(self, groups: Iterable[dict[str, Any]], stepped: Iterable[torch.Tensor]) -> None:
        """A step was taken for these parameters: let ``groups`` be what it makes of them."""

    def forget_state(self, groups: Iterable[dict[str, Any]]) -> None:
        """Be as before the first step, and ``groups``, but for the components and the options."""

    # State from a checkpoint.

    def reads(self, kept_by: str, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the state of that optimizer, whose options are in ``groups``, means the same
        here.
        """
        return kept_by == self.kept_by

    def check_options(self, kept_by: str, options: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for options that cannot go on with the state of ``kept_by``."""

    def check_saved(self, saved: SavedState) -> None:
        """Raises ``ValueError`` for state of a parameter that has no place here."""
        check_components(saved, self.kept_by)
        check_dtypes(saved)
        if saved.has_blocks and not saved.is_tiled_alike:
            raise ValueError(
                f"{saved.path} has state of {saved.name} in other tiles, and blocks of it end with "
                "a tile; load it with the max_parameter_bytes that it was saved with"
            )

    def steps(self, saved: SavedState) -> int:
        """How many steps the state of a parameter is from: 0 where there is none of it."""
        is_lost = saved.here and not {*saved.here} & {*saved.components}
        return 0 if is_lost else saved.steps

    def restore(
        self, index: int, dtype: torch.dtype, saved: SavedState, small: Mapping[str, Any]
    ) -> None:
        """Take ``small``, what was in memory of the state of parameter ``index``, whose weights are
        of ``dtype`` here.
        """


class FrozenRule(OptimizerRule):
    """No optimizer: weights only, for inference."""

    kept_by = None
    takes_steps = False
    is_repeatable = False
    names_dtypes = False

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        return ()

    def check(self, update: ParameterUpdate) -> None:
        raise AssertionError("a frozen parameter has no update")

    def apply(self, *_: object, **__: object) -> None:
        raise AssertionError("a frozen parameter has no update")


class NativeOptimizer(ABC):
    """The options of an optimizer of ours, for ``offload(model, optimizer=...)``."""

    __slots__ = ()

    @abstractmethod
    def rule(self, trained: Sequence[Record]) -> OptimizerRule:
        """The rule for these parameters. Raises ``ValueError`` naming one that it does not fit."""

    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """What parameter groups begin with."""


def check_components(saved: SavedState, kept_by: str | None) -> None:
    """Raises ``ValueError`` for state of a parameter that is trained here, and was, which the
    optimizer ``kept_by`` has no component for.
    """
    if not (saved.is_trained and saved.steps):
        return
    for name in saved.components:
        if name not in saved.here:
            raise ValueError(
                f"{saved.path} has the state {name} of {saved.name}, which {kept_by} does not keep "
                "as it is made here; make it with the options that it was saved with"
            )


def check_dtypes(saved: SavedState) -> None:
    """Raises ``ValueError`` for state that is kept in another dtype here."""
    if saved.is_converted:
        return
    for name, ours in saved.here.items():
        theirs = saved.dtypes.get(name, ours)
        if theirs != ours:
            raise ValueError(
                f"{saved.path} has the state {name} of {saved.name} in {theirs}, the optimizer "
                f"keeps {ours}; load it with an optimizer that keeps it as it was saved"
            )


def last_name(kept_by: str) -> str:
    """The name of a class without its module, which is ``__main__`` for a script."""
    return kept_by.rpartition(".")[2]
