"""Modes that a program has on around the block, its entry and its steps change nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from tests.support.models import seeded
from tests.support.proof import by_turns
from tests.support.training import WHOLE, default_dtype, least_budget, same_bits, values_of

WIDTH = 144
Mode = Callable[[], AbstractContextManager[Any]]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        result: torch.Tensor = self.norm(x)
        return result


@contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Mode] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "on meta": lambda: torch.device("meta"),
    "default device": _default_device,
}
OPTIMIZERS: dict[str, Any] = {
    "native": infinity.AdamW(lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def _input(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float32, device="cpu")


def _train(
    nvme: Path, path: Path, mode: Mode, optimizer: Any, host_memory: int
) -> dict[str, torch.Tensor]:
    """Train with ``mode`` on around everything, also the passes of a mode that allows them."""
    model = seeded(_Model)
    options = {"optimizer": optimizer, "host_memory": host_memory, "max_grad_norm": 0.01}
    with mode(), infinity.offload(model, nvme, **options) as offloaded:
        for number in range(4):
            with torch.inference_mode(False), torch.enable_grad():
                offloaded.backward(model(_input(number)).square().mean())
            offloaded.step()
            assert offloaded.grad_norm.dtype == torch.float32
            assert not offloaded.grad_norm.is_inference()
            if number == 1:
                offloaded.save(path)
            if number == 2:
                offloaded.load(path)
        with offloaded.gathered(model.norm, modify=True), torch.no_grad():
            model.norm.weight.mul_(2)
        with torch.inference_mode(False), torch.enable_grad():
            model(_input(9)).square().mean().backward()
        norm = offloaded.clip_grad_norm_(1.0)
        assert norm.dtype == torch.float32
        offloaded.step()
    values = values_of(model)
    model(_input(0)).square().mean().backward()  # as ordinary tensors can
    return values


@pytest.mark.parametrize(("name", "optimizer"), by_turns(MODES, [*OPTIMIZERS.values()]))
def test_training_inside_a_mode_is_training_without(
    name: str, optimizer: Any, nvme: Path, tmp_path: Path
) -> None:
    least = least_budget(_Model, nvme, optimizer=optimizer)
    expected = _train(nvme, tmp_path / "saved", torch.enable_grad, optimizer, WHOLE)
    for host_memory in (WHOLE, least):
        values = _train(nvme, tmp_path / "saved", MODES[name], optimizer, host_memory)
        assert all(same_bits(value, values[key]) for key, value in expected.items())


def test_inference_inside_inference_mode_leaves_a_model_that_trains(nvme: Path) -> None:
    model = seeded(_Model)
    options: dict[str, Any] = {"optimizer": None, "compute_dtype": torch.bfloat16}
    with torch.inference_mode(), infinity.offload(model, nvme, **options):
        model(_input(0).bfloat16())
    assert not any(value.is_inference() for value in (*model.parameters(), *model.buffers()))
    model(_input(0)).square().mean().backward()


def test_tiles_that_come_back_in_inference_mode_are_ordinary(nvme: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 1024))
    with torch.inference_mode(), infinity.offload(model, nvme, max_parameter_bytes=1 << 18):
        pass
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODES)
def test_checkpoints_alone_are_saved_and_loaded_in_any_mode(name: str, tmp_path: Path) -> None:
    state = {"weights": torch.arange(5.0), "count": torch.tensor(3), "view": torch.ones(4)[1:]}
    with MODES[name]():
        checkpoint.save(state, tmp_path / "saved")
        loaded = checkpoint.load(tmp_path / "saved")
        checkpoint.load(tmp_path / "saved", into={"count": state["count"]})
    assert all(same_bits(value, loaded[key]) for key, value in state.items())
