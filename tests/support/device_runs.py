"""Training on a device: offloaded within budgets, and with everything in its memory.

``device`` is "cuda" on a GPU, or "cpu": then all is as there but for what streams do, so each check
that needs a GPU also runs without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_bench.exact_adamw import Options
from gpu_bench.in_memory import ExactUpdate
from torch import nn

import infinity
from tests.support.models import Gpt, Recompute, seeded, tokens
from tests.support.training import Outcome, values_of

LR = 1e-2
LOSS_SCALE = 2.0**16
"""The first one of float16."""
AMPLE = {"host_memory": "2GiB", "device_memory": "1GiB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how it is trained. ``weight`` multiplies the loss: a large one overflows in
    float16. ``compiles``: each block of the model is compiled by itself.
    """

    device: str
    dtype: torch.dtype = torch.bfloat16
    clip: float | None = None
    steps: int = 5
    accumulate: int = 1
    weight: float = 1.0
    recompute: Recompute = "no"
    compiles: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, device: str = "cpu") -> Gpt:
        """In float32. Sizes of parameters are multiples of 16."""
        model = seeded(partial(Gpt, width=192, depth=4, recompute=self.recompute)).to(device)
        if self.compiles:
            for block in model.blocks:
                block.compile()
        return model

    def loss(self, model: nn.Module, number: int) -> torch.Tensor:
        """Of a batch, which is that of its number."""
        batch = tokens(number, batch=4, length=32).to(self.device)
        logits = model(batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) * self.weight

    def losses(self, model: nn.Module, step: int) -> Iterator[torch.Tensor]:
        """The parts of a step, whose gradients are added up."""
        for part in range(self.accumulate):
            yield self.loss(model, step * self.accumulate + part) / self.accumulate


def budgets(case: Case, nvme: Path) -> dict[str, dict[str, Any]]:
    """From all there is to as little as works."""
    plan = infinity.plan(
        case.model(), host_memory=1, device=case.device, compute_dtype=case.dtype, **case.options
    )
    host, device = plan.least_host_bytes, plan.least_device_bytes
    return {
        "ample": AMPLE,
        "tight": {"host_memory": host + (4 << 20), "device_memory": 2 * device},
        "least": {"host_memory": host, "device_memory": device},
    }


@contextmanager
def block_of(
    case: Case, model: nn.Module, nvme: Path, budget: dict[str, Any]
) -> Iterator[infinity.OffloadedModel]:
    """``model`` offloaded as the case has it."""
    with infinity.offload(
        model,
        nvme,
        optimizer=infinity.AdamW(lr=LR),
        device=case.device,
        compute_dtype=case.dtype,
        max_grad_norm=case.clip,
        **case.options,
        **budget,
    ) as offloaded:
        yield offloaded


def train(case: Case, offloaded: infinity.OffloadedModel, steps: Sequence[int]) -> Outcome:
    """Losses and norms of these steps, and the values after them, on the CPU."""
    losses, norms = [], []
    for step in steps:
        for loss in case.losses(offloaded.model, step):
            offloaded.backward(loss)
            losses.append(loss.item())
        offloaded.step()
        norms.append(_known(offloaded.grad_norm.item()))
    with offloaded.gathered():
        values = {name: value.cpu() for name, value in values_of(offloaded.model).items()}
    return Outcome(tuple(losses), tuple(norms), values, offloaded.report().read_bytes)


def offloaded_run(case: Case, nvme: Path, budget: dict[str, Any]) -> Outcome:
    """The case, offloaded."""
    with block_of(case, case.model(), nvme, budget) as offloaded:
        return train(case, offloaded, range(case.steps))


def run_in_memory(case: Case) -> Outcome:
    """The case with everything in the memory of the device, by plain autograd and
    ``ExactUpdate``; in float16 the loss scale is halved when a step overflows, which is none.
    """
    model = case.model(case.device)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(case.dtype)
    update = ExactUpdate(list(model.parameters()), Options(lr=LR), case.clip, masters)
    scale = LOSS_SCALE if case.dtype == torch.float16 else 1.0
    losses, norms = [], []
    for step in range(case.steps):
        for loss in case.losses(model, step):
            (loss * scale).backward()
            losses.append(loss.item())
        norms.append(_known(update(scale).item()))
        if norms[-1] == math.inf:
            scale /= 2
    values = {name: value.cpu() for name, value in values_of(model).items()}
    return Outcome(tuple(losses), tuple(norms), values, 0)


def run_with_update_of_torch(case: Case) -> Outcome:
    """float32 gradients from the device, updated on the CPU by torch's fused AdamW."""
    model = case.model(case.device)
    masters = [p.detach().to("cpu", copy=True).requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    losses, norms = [], []
    for step in range(case.steps):
        for loss in case.losses(model, step):
            loss.backward()
            losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.to("cpu", copy=True), None
        gradients = [p.grad.double() for p in masters if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).float().item())
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    values = {name: value.cpu() for name, value in values_of(model).items()}
    return Outcome(tuple(losses), tuple(norms), values, 0)


def _known(norm: float) -> float:
    """Which of infinite and NaN a norm that overflowed is does not matter."""
    return norm if math.isfinite(norm) else math.inf


@contextmanager
def deterministic() -> Iterator[None]:
    """The backward pass of attention adds up in any order otherwise, and so do additions to rows of
    an embedding. New memory is not what it was by chance, but NaN, which shows where it is read.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train_rank(rank: int, folder: Path, *, device: str, backend: str) -> dict[str, Any]:
    """One of two ranks, on batches of its own; ranks of gloo may share a device."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    group = dist.new_group(backend=backend)
    case = Case(device=device, clip=0.5, options={"process_group": group})
    model = case.model()
    with deterministic(), block_of(case, model, folder, AMPLE) as offloaded:
        losses = []
        for step in range(case.steps):
            loss = case.loss(model, 2 * step + rank)
            offloaded.backward(loss)
            offloaded.step()
            losses.append(loss.item())
        with offloaded.gathered():
            values = {name: value.cpu() for name, value in values_of(model).items()}
    torch.save(values, folder / f"values-{rank}")
    return {"losses": losses}
