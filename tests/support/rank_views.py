"""What ranks do with views of gathered weights that they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.rank_jobs import least_budget, world


def kept_over_a_step(rank: int, folder: Path, *, host_memory: int | str) -> list[str]:
    """What the uses of views of two weights end in, one of which a forward pass keeps."""
    if host_memory == "least":
        host_memory = least_budget(Stack, folder) + (4 << 20)
    model, kept = seeded(Stack), []
    model.layer(0).register_forward_hook(lambda layer, *_: kept.append(layer.weight.t()))
    options: dict[str, Any] = {"host_memory": host_memory, "process_group": world()}
    with infinity.offload(model, folder, **options) as offloaded:
        outside = model.layer(1).weight.t()
        offloaded.backward(vector_loss(model, rank))
        before = [_use(kept[0]), _use(outside)]
        offloaded.step()
        return [*before, _use(kept[0]), _use(outside)]


def _use(view: torch.Tensor) -> str:
    try:
        view.sum().item()
    except RuntimeError as error:
        return str(error)
    return ""
