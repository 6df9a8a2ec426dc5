"""What an optimizer does to one subgroup: the planes it keeps, and the update itself.

A rule sees tensors and numbers, never files or threads. ``AdamRule`` runs the native kernel on
every segment; ``TorchRule`` runs any ``torch.optim.Optimizer`` on whole parameters in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from swap.kernels import MOMENT_BLOCK, AdamHyper, Origin, adam_step
from swap.plan.layout import Plane, Segment


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


class UpdateRule(Protocol):
    """The contract between an optimizer and the pipeline.

    ``planes`` names the arrays kept beside the weights of a dtype. ``whole_parameters`` asks for
    subgroups that never split a parameter. ``scratch_bytes_per_element`` is memory that ``apply``
    takes beyond its arguments.
    """

    whole_parameters: bool
    scratch_bytes_per_element: int

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        """Planes beside ``weight`` for weights of ``dtype``."""

    def check(self, update: ParameterUpdate) -> None:
        """Raise what ``apply`` would raise for the options of ``update``, before anything is
        changed.
        """

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        planes: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        """Update one segment in place. All tensors are flat, on the CPU, with values for
        ``segment.length`` elements.
        """


def master_planes(dtype: torch.dtype) -> tuple[Plane, ...]:
    """What completes weights of ``dtype`` to a float32 master: its low half, a copy, or nothing."""
    if dtype == torch.bfloat16:
        return (Plane("lo", torch.int16),)
    if dtype in (torch.float32, torch.float64):
        return ()
    return (Plane("master", torch.float32),)


class FrozenRule:
    """No optimizer: weights only, for inference."""

    whole_parameters = False
    scratch_bytes_per_element = 0

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return ()

    def check(self, update: ParameterUpdate) -> None:
        raise AssertionError("a frozen parameter has no update")

    def apply(self, *_: object, **__: object) -> None:
        raise AssertionError("a frozen parameter has no update")


MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
"""What ``AdamRule`` keeps moments in; uint8 are codes, with a scale for each block of elements."""


class AdamRule:
    """Adam or AdamW by the native kernel. Options: lr, betas, eps, weight_decay, maximize,
    decoupled (for torch decoupled_weight_decay: false for Adam); ``ValueError`` for others of
    torch's that change what is computed.

    Moments of fewer than 32 bits are rounded by random bits that are a function of the parameter's
    index, the element in it, and its step count, so not even they depend on the placement.
    """

    whole_parameters = False
    scratch_bytes_per_element = 0

    def __init__(self, *, state_dtype: torch.dtype = torch.float32, threads: int | None = None):
        assert state_dtype in STATE_DTYPES
        self.state_dtype = state_dtype
        self._threads = threads

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        moments = (Plane(name, self.state_dtype, zero=True) for name in MOMENTS)
        scales: tuple[Plane, ...] = ()
        if self.state_dtype == torch.uint8:
            scales = tuple(
                Plane(f"{name}_scale", torch.float32, zero=True, per=MOMENT_BLOCK)
                for name in MOMENTS
            )
        return (*master_planes(dtype), *moments, *scales)

    def check(self, update: ParameterUpdate) -> None:
        _hyper(update, 1.0)

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        planes: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        adam_step(
            weight=planes["weight"],
            rest=planes.get("lo", planes.get("master")),
            exp_avg=planes["exp_avg"],
            exp_avg_sq=planes["exp_avg_sq"],
            grad=gradient,
            exp_avg_scale=planes.get("exp_avg_scale"),
            exp_avg_sq_scale=planes.get("exp_avg_sq_scale"),
            hyper=_hyper(update, gradient_scale),
            origin=Origin(parameter=segment.parameter, first=update.first + segment.start),
            threads=self._threads,
        )


UNKNOWN_OPTIONS = {
    "amsgrad": "the largest second moments are not kept",
    "differentiable": "an update is not recorded for autograd",
}
"""Options of torch's AdamW that change what it computes and that the kernel does not have."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` naming an option that asks for what the kernel does not compute."""
    for name, reason in UNKNOWN_OPTIONS.items():
        if options.get(name):
            raise ValueError(
                f"{name}=True in a parameter group: {reason} here; set it to False, or use "
                "torch.optim.AdamW"
            )


def _hyper(update: ParameterUpdate, gradient_scale: float) -> AdamHyper:
    options = update.options
    check_options(options)
    beta1, beta2 = options["betas"]
    return AdamHyper(
        lr=float(options["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        step=update.step,
        grad_scale=-gradient_scale if options.get("maximize") else gradient_scale,
        decoupled=bool(options.get("decoupled", options.get("decoupled_weight_decay", True))),
    )
