"""Where the state of a parameter is that any optimizer of torch keeps: what has a value for every
element in planes, each in the dtype that the optimizer gives it; the rest in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from swap.plain import is_in_place, plain
from swap.plan.layout import Plane

IN_PLANES = "infinity.planes"
"""Key in the small state of a parameter: the names of its state that the planes hold."""
_TAKEN = ("weight", "lo", "master")
"""Planes that are no state."""


class StatePlanes:
    """The planes for the state of parameters of one dtype, by the names that the state has.

    What a plane cannot hold exactly (a value of another shape or dtype under the same name, or
    none) is small state.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer
        self._planes: dict[str, Plane] = {}

    @property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(self._planes.values())

    def note(self, state: Mapping[str, Any], shape: torch.Size) -> None:
        """Have a plane for everything in ``state`` that a parameter of ``shape`` has a value of
        for every element.

        Raises ``ValueError`` naming what has no place.
        """
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                self._check(name, value)
                self._planes.setdefault(name, Plane(_plane_name(name), value.dtype, zero=True))

    def state(
        self, small: Mapping[str, Any], planes: Mapping[str, torch.Tensor], shape: torch.Size
    ) -> dict[str, Any]:
        """What the optimizer kept of a parameter: ``small``, and views of the planes."""
        state = {name: value for name, value in small.items() if name != IN_PLANES}
        for name in small.get(IN_PLANES, ()):
            state[name] = planes[self._planes[name].name].view(shape)
        return state

    def keep(
        self,
        after: Mapping[str, Any],
        planes: Mapping[str, torch.Tensor],
        small: dict[str, Any],
        shape: torch.Size,
    ) -> None:
        """Bring ``after``, the state of a parameter, to the planes and to ``small``."""
        small.clear()
        held = []
        for name, value in after.items():
            plane = self._planes.get(name)
            if plane is None or not _fits(value, plane, shape):
                small[name] = value
                continue
            held.append(name)
            if not is_in_place(value, planes[plane.name]):
                planes[plane.name].copy_(plain(value).reshape(-1))
        small[IN_PLANES] = held

    def restore(self, small: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
        """Small state that was saved; ``stored`` are the names of the planes that were.

        What was saved before small state named what is in planes had all of it there.
        """
        held = [
            name
            for name, plane in self._planes.items()
            if plane.name in stored and name not in small
        ]
        return {IN_PLANES: held} | dict(small)

    def _check(self, name: str, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            kind = f"{type(value).__name__} of layout {value.layout}"
        elif value.is_quantized or value.device.type != "cpu":
            kind = f"{value.dtype} on {value.device}"
        else:
            kept = self._planes.get(name)
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


def _plane_name(state_name: Any) -> str:
    return f"state_{state_name}" if state_name in _TAKEN else str(state_name)


def _fits(value: Any, plane: Plane, shape: torch.Size) -> bool:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and value.shape == shape and value.dtype == plane.dtype
