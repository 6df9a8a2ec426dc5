"""Where the state of a parameter is that any optimizer of torch keeps: what has a value for every
element in components, each in the dtype that the optimizer gives it; the rest in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from checkpoint.format.tree import encode_tree
from infinity.parameters.records import ALWAYS_ON_HOST_ELEMENTS
from swap.plain import is_same_view, overlap
from swap.plan.layout import Component

IN_COMPONENTS = "infinity.planes"
"""Key in the small state of a parameter: the names of its state that the components hold."""
_SAME_AS = "infinity.same_as"
"""Key there: names of its state that are one tensor with that of another name, or the weights."""
_OURS = (IN_COMPONENTS, _SAME_AS)
_TAKEN = ("weight", "lo", "master")
"""Components that are no state."""

Move = tuple[torch.Tensor, torch.Tensor]
"""Memory, and the values that it is to have."""


class StateComponents:
    """The components for the state of parameters of one dtype, by the names that the state has.

    What a component cannot hold exactly (a value of another shape or dtype under the same name, or
    none) is small state.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._components: dict[str, Component] = {}
        self._others: set[str] = set()
        """The names of tensors of other shapes, which one of the shape of a parameter can have."""

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(self._components.values())

    def note(self, state: Mapping[str, Any], shape: torch.Size) -> None:
        """Have a component for everything in ``state`` that a parameter of ``shape`` has a value of
        for every element.

        Raises ``ValueError`` naming what has no place.
        """
        for name, value in state.items():
            self._check_kept(name, value)
            if isinstance(value, torch.Tensor) and value.shape == shape:
                self._check(name, value)
                self._components.setdefault(
                    name, Component(_component_name(name), value.dtype, zero=True)
                )
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                self._others.add(name)

    def state(
        self,
        small: Mapping[str, Any],
        components: Mapping[str, torch.Tensor],
        weights: torch.Tensor,
    ) -> dict[str, Any]:
        """What the optimizer kept of a parameter, which has these ``weights``: ``small``, and views
        of the components.
        """
        state = {name: value for name, value in small.items() if name not in _OURS}
        for name in small.get(IN_COMPONENTS, ()):
            state[name] = components[self._components[name].name].view(weights.shape)
        for name, *others in small.get(_SAME_AS, ()):
            state[name] = state[others[0]] if others else weights
        return state

    def keep(
        self,
        after: Mapping[str, Any],
        components: Mapping[str, torch.Tensor],
        small: dict[str, Any],
        weights: torch.Tensor,
    ) -> list[Move]:
        """Bring ``after``, the state of a parameter, which has these ``weights`` now, to ``small``
        and to the components: gives the copies for that, which are to be made together.

        Raises ``ValueError`` naming what lies in a part of the memory of another, and what of a
        large parameter has no component; nothing is changed then.
        """
        memories = [*components.values()]
        self._check_places(after, weights.shape)
        same = self._same(after, weights, memories)
        small.clear()
        moves, held = [], []
        for name, value in after.items():
            component = self._components.get(name)
            if component is None or not _fits(value, component, weights.shape):
                small[name] = tree_map(partial(_aside, memories=memories), value)
                continue
            held.append(name)
            moves.append((components[component.name], value))
        small[IN_COMPONENTS] = held
        if same:
            small[_SAME_AS] = same
        return moves

    def _check_places(self, after: Mapping[str, Any], shape: torch.Size) -> None:
        if shape.numel() <= ALWAYS_ON_HOST_ELEMENTS:
            return
        for name, value in after.items():
            component = self._components.get(name)
            is_of_all = isinstance(value, torch.Tensor) and value.shape == shape
            if not is_of_all or (component is None and name in self._others):
                continue
            if component is None:
                raise ValueError(
                    f"{self._optimizer} keeps the state {name!r} with a value for each element, "
                    "and made none in its first steps for parameters of as many dimensions: it has "
                    "no place but in memory beside the budget; let the first step make it, for "
                    "parameters of all sizes"
                )
            if value.dtype != component.dtype:
                raise ValueError(
                    f"{self._optimizer} keeps the state {name!r} in {value.dtype}, and in "
                    f"{component.dtype} in its first steps: it has no place but in memory beside "
                    "the budget; let it keep it in one dtype"
                )

    def _same(
        self,
        after: Mapping[str, Any],
        weights: torch.Tensor,
        memories: Sequence[torch.Tensor],
    ) -> list[list[str]]:
        """The names of state that is one tensor with that of another name, and this; of what is one
        with the ``weights``, alone. Numbers that have more than one name change together.
        """
        same: list[list[str]] = []
        seen: list[tuple[list[str], torch.Tensor]] = [([], weights)]
        for name, value in after.items():
            if not (isinstance(value, torch.Tensor) and _is_ordinary(value)):
                continue
            for other, tensor in seen:
                if not overlap(value, tensor):
                    continue
                if is_same_view(value, tensor):
                    same.append([name, *other])
                    break
                both = (value, tensor)
                if any(one.shape == weights.shape or _lies_in(one, memories) for one in both):
                    raise self._refusal(name, other)
            else:
                seen.append(([name], value))
        return same

    def _refusal(self, name: str, other: Sequence[str]) -> ValueError:
        what = f"of its state {other[0]!r}" if other else "of the parameter"
        return ValueError(
            f"{self._optimizer} keeps the state {name!r} in a part of the memory {what}, and an "
            "offloaded model keeps each in its own; let it make a tensor for each"
        )

    def restore(self, small: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
        """Small state that was saved; ``stored`` are the names of the components that were.

        What was saved before small state named what is in components had all of it there.
        """
        held = [
            name
            for name, component in self._components.items()
            if component.name in stored and name not in small
        ]
        return {IN_COMPONENTS: held} | dict(small)

    def _check_kept(self, name: str, value: Any) -> None:
        """Raises ``ValueError`` for what no checkpoint holds: a run could not be saved."""
        try:
            encode_tree({name: value}, lambda leaf: isinstance(leaf, (torch.Tensor, np.ndarray)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._optimizer} keeps {name!r} of a parameter, which could not be saved "
                f"({error}); let its state have numbers, text, tensors, and lists, tuples, sets "
                "and dictionaries of these"
            ) from error

    def _check(self, name: str, value: torch.Tensor) -> None:
        if not _is_ordinary(value) or value.layout != torch.strided:
            kind = f"{type(value).__name__} of layout {value.layout}"
        elif value.is_quantized or value.device.type != "cpu":
            kind = f"{value.dtype} on {value.device}"
        else:
            kept = self._components.get(name)
            if kept is None or kept.dtype == value.dtype:
                return
            raise ValueError(
                f"{self._optimizer} keeps the state {name!r} in {kept.dtype} for some parameters "
                f"and in {value.dtype} for others, and an offloaded model keeps it in one dtype; "
                "let it use one, or another name for each"
            )
        raise ValueError(
            f"{self._optimizer} keeps the state {name!r} as {kind}, and an offloaded model keeps "
            "plain dense tensors on the CPU; let it keep its state so, or use infinity.AdamW, with "
            "state_dtype=torch.uint8 where that is to be small"
        )


def _component_name(state_name: Any) -> str:
    return f"state_{state_name}" if state_name in _TAKEN else str(state_name)


def _fits(value: Any, component: Component, shape: torch.Size) -> bool:
    return _is_ordinary(value) and value.shape == shape and value.dtype == component.dtype


def _is_ordinary(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _aside(value: Any, memories: Sequence[torch.Tensor]) -> Any:
    """``value``, or a copy of a tensor that lies in memory which others are given next."""
    return value.detach().clone() if _is_ordinary(value) and _lies_in(value, memories) else value


def _lies_in(tensor: torch.Tensor, memories: Sequence[torch.Tensor]) -> bool:
    return any(overlap(tensor, memory) for memory in memories)
