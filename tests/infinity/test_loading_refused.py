"""What a load that is refused leaves: all as it was; and what a module refuses comes last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from tests.support.models import seeded
from tests.support.training import same_bits

WIDTH = 144


class _Model(nn.Module):
    def __init__(self, numel: int = 3, *, refuses: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("b", torch.zeros(numel))
        self.refuses = refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            torch.rand(3)
            raise ValueError("another version")


def _train(offloaded: infinity.OffloadedModel, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        offloaded.model(x).square().mean().backward()
        offloaded.step()


def _trained_over_a_refused_load(nvme: Path, path: Path | None) -> torch.Tensor:
    model = seeded(lambda: _Model(5))
    with infinity.offload(model, nvme) as offloaded:
        _train(offloaded, range(3))
        if path is not None:
            with pytest.raises(ValueError, match=r"does not fit the model.*\['b'\].*\(5,\)"):
                offloaded.load(path)
        _train(offloaded, range(3, 5))
    return model.layer.weight.detach()


def test_loading_with_a_buffer_of_another_shape_changes_nothing(nvme: Path, tmp_path: Path) -> None:
    with infinity.offload(_Model(3), nvme, optimizer=None) as offloaded:  # it has no moments
        offloaded.save(tmp_path / "saved")
    refused = _trained_over_a_refused_load(nvme, tmp_path / "saved")
    assert same_bits(refused, _trained_over_a_refused_load(nvme, None))


def test_loading_when_a_module_refuses_its_state_has_loaded_everything_else(
    nvme: Path, tmp_path: Path
) -> None:
    model = seeded(_Model)
    with infinity.offload(model, nvme) as offloaded:
        _train(offloaded, range(2))
        offloaded.save(tmp_path / "saved")
        random = torch.get_rng_state()
        _train(offloaded, range(2, 4))
    other = seeded(lambda: _Model(refuses=True), 1)
    with infinity.offload(other, nvme) as offloaded:
        _train(offloaded, range(5, 6))
        other(torch.ones(1, WIDTH)).sum().backward()  # a gradient that belongs to other weights
        with pytest.raises(ValueError, match="another version"):
            offloaded.load(tmp_path / "saved")
        assert torch.equal(torch.get_rng_state(), random)
        _train(offloaded, range(2, 4))
    assert same_bits(other.layer.weight, model.layer.weight)


def test_load_of_a_plain_checkpoint_says_where_its_weights_are_taken(
    nvme: Path, tmp_path: Path
) -> None:
    model = torch.nn.Linear(4, 4)
    checkpoint.save({"model": model.state_dict()}, tmp_path / "plain")
    with (
        infinity.offload(model, nvme, host_memory="1GiB") as offloaded,
        pytest.raises(
            ValueError, match=r"no checkpoint that offloaded.save wrote.*weights='.*plain'"
        ),
    ):
        offloaded.load(tmp_path / "plain")


class _Coded(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.codes = nn.Parameter(values, requires_grad=False)
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.float32, torch.int8),
        (torch.int8, torch.float32),
        (torch.int32, torch.uint8),
    ],
)
def test_weights_that_are_other_kinds_of_numbers_here_are_refused_by_name(
    stored: torch.dtype, here: torch.dtype, nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(_Coded(torch.full((3,), 300).to(stored)), nvme) as offloaded:
        offloaded.save(tmp_path / "saved")
    model = _Coded(torch.ones(3, dtype=here))
    refused = pytest.raises(ValueError, match=rf"codes was saved in {stored} and is {here}")
    with infinity.offload(model, nvme) as offloaded, refused:
        offloaded.load(tmp_path / "saved")
    assert same_bits(model.codes, torch.ones(3, dtype=here))


@pytest.mark.parametrize(
    ("stored", "here"),
    [(torch.complex64, torch.complex128), (torch.float8_e4m3fn, torch.bfloat16)],
)
def test_weights_of_more_precision_here_take_those_that_were_saved(
    stored: torch.dtype, here: torch.dtype, nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(_Coded(torch.full((3,), 3.5).to(stored)), nvme) as offloaded:
        offloaded.save(tmp_path / "saved")
    model = _Coded(torch.ones(3, dtype=here))
    with infinity.offload(model, nvme) as offloaded:
        offloaded.load(tmp_path / "saved")
    assert same_bits(model.codes, torch.full((3,), 3.5).to(here))
