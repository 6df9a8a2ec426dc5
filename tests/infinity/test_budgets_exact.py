"""Where bytes live changes no bit: the same training under every budget, with overlap or not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import LowGpt as Gpt
from tests.support.models import (
    Repeated,
    Routed,
    Stack,
    Zoo,
    low_vector_loss,
    seeded,
    token_loss,
    vector_loss,
)
from tests.support.proof import matrix
from tests.support.training import LossOf, assert_same_runs, same_bits, train_each


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, the options of ``offload``, and how long it is trained."""

    make: Callable[[], nn.Module]
    loss_of: LossOf = token_loss
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 4


def _with_frozen_layers() -> nn.Module:
    model = Gpt()
    model.embedding.requires_grad_(False)
    for block in model.blocks[::2]:
        block.requires_grad_(False)
    return model


def _with_low_rank() -> nn.Module:
    """A frozen model with small trained parts, as LoRA has it."""
    model = Stack(width=512)
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(False)
        assert isinstance(layer, nn.Linear)
        adapter = nn.Sequential(nn.Linear(512, 4, bias=False), nn.Linear(4, 512, bias=False))
        model.layers[index] = _Adapted(layer, adapter)
    return model


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter = adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.adapter(x)
        return result


def _with_mixed_dtypes() -> nn.Module:
    model = Gpt(tied=False, width=128, depth=6)
    model.blocks[1].to(torch.float64)
    model.blocks[2].to(torch.bfloat16)
    model.blocks[4].to(torch.float16)
    for index, dtype in ((1, torch.float64), (2, torch.bfloat16), (4, torch.float16)):
        model.blocks[index].register_forward_pre_hook(_Cast(dtype))
        model.blocks[index].register_forward_hook(_Cast(torch.float32))
    return model


class _Cast:
    """A hook that casts the only input, or the output, of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> Any:
        return args[0].to(self._dtype) if output is None else output.to(self._dtype)


BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
FP16: dict[str, Any] = {"compute_dtype": torch.float16}
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5}
REPEATED = partial(Repeated, width=360, depth=6)
ADAM = infinity.AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1)

CASES = {
    "fp32": Case(Gpt, steps=20),
    "bf16": Case(Gpt, options=BF16, steps=20),
    "fp16": Case(Gpt, options=FP16),
    "fp32 clipped": Case(Gpt, options=CLIPPED | {"optimizer": ADAM}, steps=20),
    "bf16 clipped": Case(Gpt, options=BF16 | CLIPPED | {"optimizer": ADAM}, steps=20),
    "fp16 clipped": Case(Gpt, options=FP16 | CLIPPED | {"optimizer": ADAM}),
    "fp32 accumulated": Case(Gpt, options={"accumulate": 2}, steps=20),
    "bf16 accumulated, clipped": Case(Gpt, options=BF16 | CLIPPED | {"accumulate": 2}, steps=3),
    "fp32 recomputed": Case(partial(Gpt, recompute="non-reentrant")),
    "bf16 recomputed": Case(partial(Gpt, recompute="non-reentrant"), options=BF16, steps=20),
    "fp32 recomputed by reentry, dropout": Case(
        partial(Gpt, recompute="reentrant", dropout=0.2), options=CLIPPED
    ),
    "bf16 recomputed by reentry, accumulated": Case(
        partial(Gpt, recompute="reentrant"), options=BF16 | {"accumulate": 2}, steps=3
    ),
    "fp32 dropout, recomputed": Case(partial(Gpt, recompute="non-reentrant", dropout=0.3)),
    "fp32 frozen layers": Case(_with_frozen_layers),
    "bf16 low rank": Case(_with_low_rank, partial(vector_loss, width=512), BF16),
    "fp32 layers used twice": Case(REPEATED, low_vector_loss),
    "bf16 layers used twice, clipped": Case(
        REPEATED, partial(vector_loss, width=360), BF16 | CLIPPED
    ),
    "fp32 zoo": Case(Zoo, options=CLIPPED),
    "bf16 zoo": Case(Zoo, options=BF16),
    "fp32 routed": Case(Routed, partial(vector_loss, width=144)),
    "bf16 routed, clipped": Case(Routed, partial(vector_loss, width=144), BF16 | CLIPPED),
    "mixed dtypes": Case(
        _with_mixed_dtypes, options={"optimizer": partial(torch.optim.Adam, lr=1e-3)}
    ),
}

USUAL = {
    "fp16 clipped",
    "bf16 recomputed by reentry, accumulated",
    "bf16 routed, clipped",
}
"""Each dtype, way of recomputing and option once; ``make proof`` runs all."""


@pytest.mark.parametrize("name", matrix(CASES, usual=USUAL))
def test_training_under_any_budget_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    runs = train_each(case.make, case.loss_of, tmp_path, steps=case.steps, **case.options)
    assert_same_runs(runs)
    trained: set[str] = set()
    untrained: set[str] = set()
    for key, parameter in seeded(case.make).named_parameters():
        dtype = case.options.get("compute_dtype") or parameter.dtype
        moved = not same_bits(runs["whole"].values[key].to(dtype), parameter.to(dtype))
        assert parameter.requires_grad or not moved, f"{key} is frozen and changed"
        (trained if moved else untrained).add(key)
    assert len(trained) > len(untrained) / 8
    assert list(tmp_path.iterdir()) == []
