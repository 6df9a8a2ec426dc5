"""An accelerate script, by ``Accelerator`` or ``OffloadAccelerator``: accumulation, clipping, a
scheduler, evaluation, and a state saved in the middle.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity.integrations.accelerate import OffloadAccelerator
from tests.support.models import VOCABULARY, Gpt, seeded
from tests.support.training import values_of

STEPS = 6
ACCUMULATE = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Losses by batch, norms by step, losses of evaluation, and the weights in the end."""

    seen: tuple[float, ...]
    values: Mapping[str, torch.Tensor]


def make() -> Gpt:
    return Gpt(width=96, depth=3, dropout=0.1)


def fused(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def sgd(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, everything else without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def loader(seed: int, count: int, batch: int = 2) -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, 16), generator=rng)
    order = torch.Generator().manual_seed(seed + 1)
    return DataLoader(TensorDataset(tokens), batch_size=batch, shuffle=True, generator=order)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def script(
    accelerator: Any,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = fused,
    folder: Path | None = None,
    resume: Path | None = None,
    kill_at: int | None = None,
    clip: str = "norm",
) -> Run:
    """What a user writes; ``folder`` takes the state after three steps."""
    model = seeded(make)
    made = optimizer(groups_of(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=STEPS)
    batches = loader(0, 2 * ACCUMULATE * STEPS)
    held_out = DataLoader(loader(5, 4).dataset, batch_size=2)
    model, made, batches, held_out, scheduler = accelerator.prepare(
        model, made, batches, held_out, scheduler
    )
    torch.manual_seed(3)
    seen, steps, skipped = [], 0, 0
    if resume is not None:
        accelerator.load_state(str(resume))
        steps = int((resume / "steps").read_text())
        skipped = steps * ACCUMULATE
    for (tokens,) in accelerator.skip_first_batches(batches, skipped) if skipped else batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            seen.append(loss.item())
            if accelerator.sync_gradients:
                if clip == "norm":
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                else:
                    accelerator.clip_grad_value_(model.parameters(), 1e-3)
            made.step()
            scheduler.step()
            made.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            seen += evaluate(model, held_out)
            if steps == 3 and folder is not None:
                accelerator.save_state(str(folder))
                (folder / "steps").write_text(str(steps))
            if steps == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    accelerator.free_memory()
    return Run(tuple(seen), values_of(model))


def evaluate(model: nn.Module, held_out: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, tokens).item() for (tokens,) in held_out]
    model.train()
    return losses


@contextmanager
def fresh_accelerate() -> Any:
    """Accelerators share their state in a process: it is put back as if there were none."""
    from accelerate.state import (  # type: ignore[import-untyped]
        AcceleratorState,
        GradientState,
    )

    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def least_of(nvme: Any, optimizer: Callable[..., torch.optim.Optimizer] = fused) -> int:
    """The least budget that ``script`` works in."""
    model = seeded(make)
    with fresh_accelerate():
        accelerator = OffloadAccelerator(cpu=True, nvme=nvme, host_memory=1)
        try:
            accelerator.prepare(model, optimizer(groups_of(model), lr=1e-2))
        except infinity.BudgetError as error:
            return error.least_host_bytes
    raise AssertionError("one byte of host memory was taken for enough")
