"""Modes that see each operation see those of the program, and none of the library's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import infinity
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

LR = 1e-2


class _Dispatched(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # torch's own, for hooks on saved tensors
            self._seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


Mode = Callable[[list[str]], AbstractContextManager[Any]]
Train = Callable[[nn.Module, torch.optim.Optimizer], list[torch.Tensor]]


def _seen_by(mode: Mode, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen: list[str] = []
    for step in range(3):
        with mode(seen):
            vector_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor([*"\n".join(seen).encode()])]


def _flops(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    with FlopCounterMode(display=False) as flops:
        vector_loss(model, 0).backward()
    return [torch.tensor(flops.get_total_flops())]


def _selective(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    assert isinstance(model, Stack)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    losses = []
    for step in range(3):
        x = vectors(step).requires_grad_()
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        loss = model.norm(x).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "train", [partial(_seen_by, _Dispatched), partial(_seen_by, _Called), _flops, _selective]
)
def test_modes_see_what_they_see_in_memory(train: Train, nvme: Path) -> None:
    plain = seeded(Stack)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=LR, fused=True))
    own = infinity.AdamW(lr=LR)
    for host_memory in (WHOLE, least_budget(Stack, nvme, optimizer=own)):
        model = seeded(Stack)
        with infinity.offload(model, nvme, optimizer=own, host_memory=host_memory) as offloaded:
            found = train(model, offloaded.optimizer)
        assert all(map(same_bits, found, expected))
        assert same_values(values_of(model), values_of(plain))


def test_a_mode_is_there_again_after_what_failed_without_it(nvme: Path) -> None:
    model = seeded(Stack)
    seen: list[str] = []
    with (
        infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)),
        _Dispatched(seen),
        _Called(seen),
    ):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 7))
        seen.clear()
        torch.ones(1).exp()
    assert {"aten.ones.default", "aten.exp.default"} <= {*seen}
    assert [name for name in seen if not name.startswith("aten")]


def test_fake_tensors_are_refused_by_name(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)):
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"FakeTensorMode.*outside"):
            model(torch.ones(2, 256))
        with FakeTensorMode(), pytest.raises(RuntimeError, match=r"layers\.0\.weight.*FakeTensor"):
            model.layer(0).weight.sum()
