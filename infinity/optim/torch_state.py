"""Where the state of a parameter is that any optimizer of torch keeps: what has a value for every
element in components, each in the dtype that the optimizer gives it; the rest in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from swap.plain import is_in_place, plain
from swap.plan.layout import Component

IN_COMPONENTS = "infinity.planes"
"""Key in the small state of a parameter: the names of its state that the components hold."""
_TAKEN = ("weight", "lo", "master")
"""Components that are no state."""


class StateComponents:
    """The components for the state of parameters of one dtype, by the names that the state has.

    What a component cannot hold exactly (a value of another shape or dtype under the same name, or
    none) is small state.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._components: dict[str, Component] = {}

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(self._components.values())

    def note(self, state: Mapping[str, Any], shape: torch.Size) -> None:
        """Have a component for everything in ``state`` that a parameter of ``shape`` has a value of
        for every element.

        Raises ``ValueError`` naming what has no place.
        """
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                self._check(name, value)
                self._components.setdefault(
                    name, Component(_component_name(name), value.dtype, zero=True)
                )

    def state(
        self, small: Mapping[str, Any], components: Mapping[str, torch.Tensor], shape: torch.Size
    ) -> dict[str, Any]:
        """What the optimizer kept of a parameter: ``small``, and views of the components."""
        state = {name: value for name, value in small.items() if name != IN_COMPONENTS}
        for name in small.get(IN_COMPONENTS, ()):
            state[name] = components[self._components[name].name].view(shape)
        return state

    def keep(
        self,
        after: Mapping[str, Any],
        components: Mapping[str, torch.Tensor],
        small: dict[str, Any],
        shape: torch.Size,
    ) -> None:
        """Bring ``after``, the state of a parameter, to the components and to ``small``."""
        small.clear()
        held = []
        for name, value in after.items():
            component = self._components.get(name)
            if component is None or not _fits(value, component, shape):
                small[name] = value
                continue
            held.append(name)
            if not is_in_place(value, components[component.name]):
                components[component.name].copy_(plain(value).reshape(-1))
        small[IN_COMPONENTS] = held

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

    def _check(self, name: str, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
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
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and value.shape == shape and value.dtype == component.dtype
