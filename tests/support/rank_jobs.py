"""What single ranks do in tests, run by ``tests.support.ranks``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import infinity
from tests.support.models import Gpt, Recompute, seeded, tokens

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gpt(recompute: Recompute = "no", width: int = 256) -> nn.Module:
    return Gpt(width=width, depth=2, recompute=recompute)


def loss_of(model: nn.Module, batch: int) -> torch.Tensor:
    rows = tokens(batch)
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def world() -> Any:
    """The group of all ranks, or None in a process that is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def least_budget(make: Callable[[], nn.Module], nvme: Path, **options: Any) -> int:
    """The number that ``offload`` names when it is given too little."""
    try:
        with infinity.offload(make(), nvme, host_memory=1, process_group=world(), **options):
            raise AssertionError("one byte of host memory was taken for enough")
    except infinity.BudgetError as error:
        return error.least_host_bytes


def train_gpt(
    rank: int,
    folder: Path,
    *,
    name: str,
    steps: int,
    batches: list[list[int]],
    host_memory: int | str = "1GiB",
    dtype: str = "float32",
    max_grad_norm: float | None = None,
    overlap: bool = True,
    recompute: Recompute = "no",
    activations: str = "keep",
    max_parameter_bytes: int | None = None,
) -> dict[str, Any]:
    """Train a GPT; in step ``s`` this rank takes the batches ``batches[rank]``, each ``+ 100 s``,
    with a gradient that is their mean (they accumulate). Values are left in ``<name>-<rank>``.

    ``host_memory="least"`` is the least that works.
    """
    model = seeded(lambda: gpt(recompute))
    options: dict[str, Any] = {
        "compute_dtype": DTYPES[dtype],
        "max_grad_norm": max_grad_norm,
        "overlap": overlap,
        "activations": activations,
        "max_parameter_bytes": max_parameter_bytes,
        "optimizer": infinity.AdamW(lr=1e-2),
    }
    if host_memory == "least":
        host_memory = least_budget(lambda: gpt(recompute), folder, **options)
    losses, norms = [], []
    mine = batches[rank]
    with infinity.offload(
        model, folder, host_memory=host_memory, process_group=world(), **options
    ) as offloaded:
        for step in range(steps):
            for batch in mine:
                loss = loss_of(model, batch + 100 * step)
                offloaded.backward(loss / len(mine))
                losses.append(loss.item())
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        offloaded.flush()
        report = offloaded.report().to_json()
    torch.save(dict(model.state_dict()), folder / f"{name}-{rank}")
    state_bytes = report["planned_bytes"]["state in host"]
    return {
        "losses": losses,
        "norms": norms,
        "state_bytes": state_bytes + report["planned_bytes"]["state on nvme"],
        "read_bytes": report["read_bytes"],
        "peak_host_bytes": report["peak_host_bytes"],
        "host_memory": host_memory,
    }


def train_each(rank: int, folder: Path, *, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``train_gpt`` with each of these arguments."""
    return [train_gpt(rank, folder, **run) for run in runs]
