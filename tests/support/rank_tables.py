"""What ranks do with tables and experts in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.rank_jobs import least_budget, world
from tests.support.tables import Words

WORDS, TILE = 6000, 1 << 19


def table() -> nn.Module:
    return Words(words=WORDS)


def experts() -> nn.Module:
    """A table before a layer of experts."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        tie_word_embeddings=True,
    )
    return transformers.MixtralForCausalLM(config)


MODELS = {"table": table, "experts": experts}


def train(
    rank: int, folder: Path, *, name: str, batches: list[list[int]], host_memory: int | str
) -> list[float]:
    """Two steps; values are left in ``<name>-<rank>``. Ranks have different words and experts."""
    make = MODELS[name]
    options: dict[str, Any] = {"max_parameter_bytes": TILE}
    if host_memory == "least":
        host_memory = least_budget(make, folder, **options)
    model, losses = seeded(make), []
    with infinity.offload(
        model, folder, host_memory=host_memory, process_group=world(), **options
    ) as offloaded:
        for step in range(2):
            for batch in batches[rank]:
                loss = _loss(name, model, batch + 100 * step)
                offloaded.backward(loss / len(batches[rank]))
                losses.append(loss.item())
            offloaded.step()
    torch.save(dict(model.state_dict()), folder / f"{name}-{rank}")
    return losses


def _loss(name: str, model: nn.Module, number: int) -> torch.Tensor:
    words = 32 if name == "experts" else 500  # of the first tiles, moved to others by the number
    rng = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, words, (1, 6), generator=rng) + (
        0 if words == 32 else 1000 * (number % 5)
    )
    logits = model(tokens) if name == "table" else model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
