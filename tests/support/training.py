"""Short training runs under a budget, and what to compare of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import infinity
from tests.support.models import seeded

WHOLE = 1 << 30
"""A budget that holds everything of the models in ``tests.support.models``."""

LossOf = Callable[[nn.Module, int], torch.Tensor]
"""The loss of a model on the batch of that number."""

Make = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's losses and gradient norms by step, and its parameters and buffers after it."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    values: Mapping[str, torch.Tensor]
    read_bytes: int


def least_budget(make: Make, nvme: Any, **options: Any) -> int:
    """The number that ``offload`` names when it is given too little."""
    try:
        with infinity.offload(make(), nvme, host_memory=1, **options):
            raise AssertionError("one byte of host memory was taken for enough")
    except infinity.BudgetError as error:
        return error.least_host_bytes


def budgets(make: Make, nvme: Any, **options: Any) -> dict[str, int]:
    """Budgets from everything in memory to as little as works."""
    least = least_budget(make, nvme, **options)
    with infinity.offload(make(), nvme, host_memory=WHOLE, **options) as offloaded:
        planned = offloaded.report().planned_bytes
        everything = sum(planned.values()) - planned["checkpoint staging"]
    between = everything + (4 << 20) - least
    assert between > 1 << 19, "the model is too small for its budget to matter"
    return {
        "whole": WHOLE,
        "most": least + between * 4 // 5,
        "some": least + between // 3,
        "least": least,
    }


def train(
    make: Make,
    loss_of: LossOf,
    nvme: Any,
    *,
    host_memory: int,
    steps: int = 20,
    accumulate: int = 1,
    **options: Any,
) -> Outcome:
    """Train ``make()`` (seeded) for ``steps`` steps of ``accumulate`` batches each."""
    model = seeded(make)
    losses, norms = [], []
    torch.manual_seed(11)
    with infinity.offload(model, nvme, host_memory=host_memory, **options) as offloaded:
        for step in range(steps):
            for part in range(accumulate):
                loss = loss_of(model, step * accumulate + part)
                offloaded.backward(loss / accumulate)
                losses.append(loss.item())
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        offloaded.flush()
        read_bytes = offloaded.report().read_bytes
    return Outcome(tuple(losses), tuple(norms), values_of(model), read_bytes)


def train_each(
    make: Make,
    loss_of: LossOf,
    nvme: Any,
    *,
    train: Callable[..., Outcome] = train,
    **options: Any,
) -> dict[str, Outcome]:
    """``train`` under each of ``budgets``, and under the tightest also without overlap."""
    offload_options = {k: v for k, v in options.items() if k not in {"steps", "accumulate"}}
    runs = {}
    for name, host_memory in budgets(make, nvme, **offload_options).items():
        runs[name] = train(make, loss_of, nvme, host_memory=host_memory, **options)
        if name == "least":
            options["overlap"] = False
            label = "least, no overlap"
            runs[label] = train(make, loss_of, nvme, host_memory=host_memory, **options)
    assert runs["whole"].read_bytes == 0
    assert all(run.read_bytes for name, run in runs.items() if "least" in name)
    return runs


def assert_same_runs(runs: Mapping[str, Outcome]) -> None:
    """All runs have the same bits in every loss, norm and value."""
    (first_name, first), *others = runs.items()
    for name, run in others:
        pair = f"{first_name} and {name}"
        assert first.losses == run.losses, f"losses of {pair}"
        assert first.norms == run.norms, f"gradient norms of {pair}"
        assert first.values.keys() == run.values.keys()
        for key, value in first.values.items():
            assert same_bits(value, run.values[key]), f"{key} of {pair}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(*flat)


def same_values(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of values have the same names in any order, and the same bits by name."""
    return a.keys() == b.keys() and all(same_bits(value, b[name]) for name, value in a.items())


def ulps_between(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """The largest distance of two float32 tensors in units in the last place.

    A unit is that of the larger of the two elements, and of ``scale`` if one is given: an update
    cannot be more exact than what it is added to.
    """
    size = torch.maximum(a.abs(), b.abs())
    if scale is not None:
        size = torch.maximum(size, scale.abs())
    exponent = torch.frexp(size.double()).exponent.clamp(min=-125)
    unit = torch.ldexp(torch.ones_like(size, dtype=torch.float64), exponent - 24)
    return float(((a.double() - b.double()).abs() / unit).max()) if a.numel() else 0.0


no_grad_modes: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": nullcontext,
}


class Plain:
    """Training in PyTorch alone: a copy of the model computes, float32 masters are updated.

    ``dtype`` is that of the copy; a master is rounded to bfloat16 with ties away from zero, as
    the library keeps it, to others as PyTorch does.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.masters = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.model = model if dtype is None else model.to(dtype)
        self._max_grad_norm = max_grad_norm
        self.optimizer = factory([*self.masters.values()])
        self.round_masters()

    def round_masters(self) -> None:
        """The copy computes with what the masters are now."""
        parameters = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            parameters[name].data = nearest(master.detach(), parameters[name].dtype)

    def step(self, *, grad_scale: float = 1.0) -> torch.Tensor:
        """Clip, update, clear; returns the norm of the gradients divided by ``grad_scale``."""
        parameters = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            gradient = parameters[name].grad
            master.grad = None if gradient is None else gradient.to(master.dtype) / grad_scale
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm([gradient.double() for gradient in gradients])
        if self._max_grad_norm is not None:
            # ``torch.nn.utils.clip_grad_norm_``, with the norm summed up in double.
            factor = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        self.optimizer.step()
        self.model.zero_grad()
        self.round_masters()
        return norm


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` in ``dtype``; halfway between two bfloat16 numbers the larger magnitude."""
    if dtype != torch.bfloat16 or values.dtype != torch.float32:
        return values.to(dtype, copy=True)
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
