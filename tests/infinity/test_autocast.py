"""Casts of weights are not kept from forward to backward: neither by autocast nor by autograd."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from tests.support.models import Stack, seeded, vectors
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget, same_bits, values_of


class _CastLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(torch.bfloat16)
        return F.linear(x.to(torch.bfloat16), weight, self.bias.to(torch.bfloat16)).float()


def _cast_by_hand() -> Stack:
    model = Stack()
    model.layers = nn.ModuleList(_CastLinear(256, 256) for _ in range(12))
    return model


def _half_frozen() -> Stack:
    model = Stack()
    for layer in model.layers[::2]:
        layer.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], Stack]] = {
    "autocast": Stack,
    "frozen": _half_frozen,
    "by hand": _cast_by_hand,
}


def _loss(model: Stack, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(vectors(step, batch=3)).float().square().mean()


def _casts_alive() -> int:
    alive = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return sum(t.dtype == torch.bfloat16 and t.numel() == 256 * 256 for t in alive)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("name", matrix(MODELS, usual=["autocast"]))
def test_casts_are_made_again_with_the_bits_of_plain_pytorch(name: str, nvme: Path) -> None:
    make = MODELS[name]
    plain = seeded(make)
    optimizer = _sgd([p for p in plain.parameters() if p.requires_grad])
    for step in range(2):
        _loss(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = values_of(plain)
    for host_memory in (WHOLE, least_budget(make, nvme, optimizer=_sgd)):
        model = seeded(make)
        with infinity.offload(model, nvme, optimizer=_sgd, host_memory=host_memory) as offloaded:
            for step in range(2):
                before = _casts_alive()
                loss = _loss(model, step)
                assert _casts_alive() == before
                loss.backward()
                offloaded.step()
        different = [
            k for k, value in values_of(model).items() if not same_bits(value, expected[k])
        ]
        assert different == []


def test_the_cache_of_autocast_is_as_it_was_after_a_forward(nvme: Path) -> None:
    model = Stack()
    seen = []
    model.layer(3).register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with infinity.offload(model, nvme):
        for enabled in (True, False):
            torch.set_autocast_cache_enabled(enabled)
            _loss(model, 0)
            assert torch.is_autocast_cache_enabled() is enabled
        torch.set_autocast_cache_enabled(True)
        with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 3))
        assert torch.is_autocast_cache_enabled()
    assert seen == [False, False]
