"""AdamW and Adam by the native kernel: options, rule, and which saved state means the same.

State goes between ``infinity.AdamW`` and ``torch.optim.AdamW``, and from ``torch.optim.Adam`` to
the first: the moments mean the same, and the step counts are converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Signature, signature
from typing import Any

import torch

from infinity.optim.rule import (
    UNNAMED,
    NativeOptimizer,
    OptimizerRule,
    SavedState,
    check_components,
    last_name,
)
from infinity.parameters.records import Record
from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin
from swap.device.kernels import adam as device_adam
from swap.kernels import adam_step_of
from swap.plan.layout import Component, Segment
from swap.plan.rules import ParameterUpdate, master_components
from swap.tiers import parse_amount, parse_number

NAME = "infinity.AdamW"
"""What checkpoints call it."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
"""What moments are kept in; uint8 are codes, with a scale for each block of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(NativeOptimizer):
    """Options of the native AdamW kernel; the defaults are those of ``torch.optim.AdamW``.

    They are the starting values of ``offloaded.optimizer.param_groups``, also a rate that is a
    tensor, of which each model gets a copy. They are read from there at every step, per group, so
    schedulers and groups with options of their own work.

    In float32 results are those of ``torch.optim.AdamW(fused=True)``, bit for bit, if each
    parameter has a multiple of 16 elements: torch's kernel rounds the elements at the end of any
    other one, which fill no vector, in another way (by one unit in the last place in a step).

    ``state_dtype`` is what both moments are kept in: ``torch.float32``; ``torch.bfloat16``, half of
    the bytes; or ``torch.uint8``, a quarter: codes of 8 bits with a scale for each 256 elements,
    after Dettmers et al. (arXiv 2110.02861). The last two round stochastically, by a function of
    parameter, element and step: training is as repeatable as in float32, but not the same.
    """

    lr: float | torch.Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    state_dtype: torch.dtype = torch.float32

    def __new__(cls, *args: object, **_: object) -> AdamW:
        if args:
            raise TypeError(
                f"infinity.AdamW takes its options by name, and no parameters: it got "
                f"{type(args[0]).__name__}; write infinity.AdamW(lr=1e-3) and pass it as "
                "offload(model, optimizer=...). The drop-in for torch.optim.AdamW is "
                "infinity.OffloadedAdamW(model.parameters(), nvme=...)"
            )
        return object.__new__(cls)  # slots make another class, which super() does not know

    def __post_init__(self) -> None:
        _check_numbers({name: getattr(self, name) for name in _NUMBERS})
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                f"state_dtype={self.state_dtype} is not supported; use one of "
                f"{', '.join(str(dtype) for dtype in STATE_DTYPES)}"
            )

    def rule(self, trained: Sequence[Record]) -> AdamRule:
        for record in trained:
            if record.spec.dtype == torch.float64:
                raise ValueError(
                    f"{record.name} is float64, which infinity.AdamW does not compute in; pass "
                    "compute_dtype=torch.float32, or a factory such as torch.optim.AdamW"
                )
        return AdamRule(state_dtype=self.state_dtype)

    def defaults(self) -> dict[str, Any]:
        options = asdict(self)
        del options["state_dtype"]
        return options


# What help() and editors show: that of the options, not of the check that they are named.
AdamW.__signature__ = Signature(  # type: ignore[attr-defined]
    [*signature(AdamW.__init__).parameters.values()][1:]
)


_NUMBERS = ("lr", "betas", "eps", "weight_decay")


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` or ``ValueError`` naming an option that no step can be taken with."""
    for name in _NUMBERS:
        if name not in options:
            raise ValueError(f"a parameter group has no option {name!r}; give it one again")
    for name in ("lr", "eps", "weight_decay"):
        parse_amount(options[name], name=name)
    betas = options["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str):
        raise TypeError(f"betas={betas!r} is a {type(betas).__name__}; give 2 numbers")
    if len(betas) != 2:
        raise ValueError(f"betas={betas} are {len(betas)} numbers; give 2")
    for position, beta in enumerate(betas):
        if not 0.0 <= parse_number(beta, name=f"betas[{position}]") < 1.0:
            raise ValueError(f"betas[{position}]={beta} is not in [0, 1)")


UNKNOWN_OPTIONS = {
    "amsgrad": "the largest second moments are not kept",
    "differentiable": "an update is not recorded for autograd",
}
"""Options of torch's AdamW that change what it computes and that the kernel does not have."""


class AdamRule(OptimizerRule):
    """Adam or AdamW by the native kernel. Options: lr, betas, eps, weight_decay, maximize,
    decoupled (for torch decoupled_weight_decay: false for Adam); ``ValueError`` for others of
    torch's that change what is computed.

    Moments of fewer than 32 bits are rounded by random bits that are a function of the parameter's
    index, the element in it, and its step count, so not even they depend on the placement.
    """

    kept_by = NAME
    options_read = frozenset(
        ("lr", "betas", "eps", "weight_decay", "maximize", "decoupled", "decoupled_weight_decay")
    ) | frozenset(UNKNOWN_OPTIONS)
    names_dtypes = False
    updates_on_device = True

    def __init__(self, *, state_dtype: torch.dtype = torch.float32, threads: int | None = None):
        assert state_dtype in STATE_DTYPES
        self.state_dtype = state_dtype
        self._threads = threads

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        moments = (Component(name, self.state_dtype, zero=True) for name in MOMENTS)
        scales: tuple[Component, ...] = ()
        if self.state_dtype == torch.uint8:
            scales = tuple(
                Component(f"{name}_scale", torch.float32, zero=True, per=MOMENT_BLOCK)
                for name in MOMENTS
            )
        return (*master_components(dtype), *moments, *scales)

    def check(self, update: ParameterUpdate) -> None:
        _check_numbers(update.options)
        _hyper(update, 1.0)

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        adam_step_of(
            _tensors(components, gradient),
            _hyper(update, gradient_scale),
            origin=_origin(segment, update),
            threads=self._threads,
        )

    def apply_aside(
        self,
        segment: Segment,
        update: ParameterUpdate,
        old: Mapping[str, torch.Tensor],
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        adam_step_of(
            _tensors(components, gradient),
            _hyper(update, gradient_scale),
            origin=_origin(segment, update),
            old=_tensors(old, gradient),
            threads=self._threads,
        )

    def apply_on_device(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        tensors, hyper = _tensors(components, gradient), _hyper(update, gradient_scale)
        device_adam.adam_step(tensors, hyper, origin=_origin(segment, update))

    def reads(self, kept_by: str, groups: Sequence[Mapping[str, Any]]) -> bool:
        if kept_by == UNNAMED:
            # The options of Adam and AdamW, which no other optimizer of torch has.
            needed = {"betas", "eps", "weight_decay", "amsgrad", "maximize"}
            return all(needed <= group.keys() for group in groups)
        is_torch_adam = kept_by.startswith("torch.") and last_name(kept_by) in ("Adam", "AdamW")
        return kept_by == NAME or is_torch_adam

    def check_options(self, kept_by: str, options: Mapping[str, Any]) -> None:
        if kept_by != NAME:
            check_options(options)

    def check_saved(self, saved: SavedState) -> None:
        if saved.kept_by != NAME:  # else the dtype of the moments alone can differ
            check_components(saved, NAME)
        check_moments(saved, self.state_dtype)

    def steps(self, saved: SavedState) -> int:
        return steps_of_moments(saved)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` naming an option that asks for what the kernel does not compute."""
    for name, reason in UNKNOWN_OPTIONS.items():
        if options.get(name):
            raise ValueError(
                f"{name}=True in a parameter group: {reason} here; set it to False, or use "
                "torch.optim.AdamW"
            )


def _tensors(components: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> AdamTensors:
    return AdamTensors(
        weight=components["weight"],
        rest=components.get("lo", components.get("master")),
        exp_avg=components["exp_avg"],
        exp_avg_sq=components["exp_avg_sq"],
        grad=gradient,
        exp_avg_scale=components.get("exp_avg_scale"),
        exp_avg_sq_scale=components.get("exp_avg_sq_scale"),
    )


def _origin(segment: Segment, update: ParameterUpdate) -> Origin:
    return Origin(parameter=segment.parameter, first=update.first + segment.start)


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


def is_torch_adamw(kept_by: str) -> bool:
    """Whether a class is the AdamW of torch, which takes the state of ours."""
    return kept_by.startswith("torch.") and last_name(kept_by) == "AdamW"


def check_moments(saved: SavedState, state_dtype: torch.dtype) -> None:
    """Raises ``ValueError`` for moments in another dtype, which are not converted, and for 8-bit
    ones whose blocks lie elsewhere.
    """
    if not {*MOMENTS} & {*saved.here} & {*saved.components}:
        return  # frozen parameters have none
    if saved.state_dtype != state_dtype:
        raise ValueError(
            f"{saved.path} has the moments of {saved.name} in {saved.state_dtype}, the optimizer "
            f"keeps {state_dtype}; pass state_dtype={saved.state_dtype} to infinity.AdamW, or "
            "to the trainer, accelerator or strategy"
        )
    if state_dtype == torch.uint8 and not saved.is_tiled_alike:
        raise ValueError(
            f"{saved.path} has 8-bit moments of {saved.name} in other tiles, and blocks of them "
            "end with a tile; load it with the max_parameter_bytes that it was saved with"
        )


def steps_of_moments(saved: SavedState) -> int:
    """The steps of a parameter: none where ours has saved it without moments."""
    is_lost = saved.kept_by == NAME and MOMENTS[0] not in saved.components
    return 0 if is_lost else saved.steps
