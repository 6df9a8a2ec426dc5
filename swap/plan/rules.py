"""What an optimizer does to one subgroup: the components it keeps, and the update itself.

A rule sees tensors and numbers, never files or threads. Which rules there are is not known here:
the one to use is handed down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from swap.plan.layout import Component, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """What a step means for one parameter: its group's options, its step count (from 1)."""

    parameter: int
    step: int
    shape: torch.Size
    options: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    """Which element of the whole parameter is the first that is kept here."""
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What programs gave the parameter, for optimizers that look at it."""
    kind: type[torch.Tensor] = field(default=torch.nn.Parameter, compare=False)
    """Its class, for those."""
    within: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, compare=False)
    """Enters what the thread that took the step had set for what it computes."""


class UpdateRule(Protocol):
    """The contract between an optimizer and the pipeline.

    ``components`` names the arrays kept beside the weights of a dtype. ``whole_parameters`` asks
    for subgroups that never split a parameter. ``scratch_bytes_per_element`` is memory that
    ``apply`` takes beyond its arguments. ``updates_on_device``: there is ``apply_on_device``.
    ``takes_steps``: False where weights are only computed with, and ``apply`` is never called.
    """

    whole_parameters: bool
    scratch_bytes_per_element: int
    updates_on_device: bool = False
    takes_steps: bool = True

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        """Components beside ``weight`` for weights of ``dtype``."""

    def check(self, update: ParameterUpdate) -> None:
        """Raise what ``apply`` would raise for the options of ``update``, before anything is
        changed.
        """

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        """Update one segment in place. All tensors are flat, on the CPU, with values for
        ``segment.length`` elements.
        """

    def apply_aside(
        self,
        segment: Segment,
        update: ParameterUpdate,
        old: Mapping[str, torch.Tensor],
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        """As ``apply``, with the same bits, from the values in ``old``, which stay; what
        ``components`` have is not looked at.
        """

    def apply_on_device(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        """As ``apply``, with the same bits, of tensors that lie on a device: starts the update on
        its current stream. It may take ``plan.sizes.DEVICE_SCRATCH_BYTES`` of its memory.
        """


def master_components(dtype: torch.dtype) -> tuple[Component, ...]:
    """What completes weights of ``dtype`` to a float32 master: its low half, a copy, or nothing."""
    if dtype == torch.bfloat16:
        return (Component("lo", torch.int16),)
    if dtype in (torch.float32, torch.float64):
        return ()
    return (Component("master", torch.float32),)
