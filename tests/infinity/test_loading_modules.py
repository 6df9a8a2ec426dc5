"""Buffers and state of modules in checkpoints: also what is None at first, or is no tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection

import checkpoint
import infinity
from tests.support.models import seeded

WIDTH = 144


class _Averages(nn.Module):
    """Keeps an average of its outputs from the first forward pass on, and counts passes."""

    average: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", None)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        mean = y.detach().mean(0).double()
        self.average = mean if self.average is None else self.average.lerp(mean, 0.1)
        self.passes += 1
        return y + self.average.float()

    def get_extra_state(self) -> Any:
        return {"passes": self.passes, "history": [torch.full((2,), float(self.passes))]}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


class _Wrapped(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.inner = _Averages()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def _train(offloaded: infinity.OffloadedModel, number: int) -> float:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = offloaded.model(x).square().mean()
    loss.backward()
    offloaded.step()
    return loss.item()


@pytest.mark.parametrize("block", [True, False])
def test_buffers_that_were_none_and_extra_state_go_on(
    block: bool, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(_Wrapped)
    with infinity.offload(model, nvme) as offloaded:
        _train(offloaded, 0)
        saving = offloaded.save(tmp_path / "saved", block=block)
        expected = _train(offloaded, 1)
        if not block:
            saving.result()
    model = seeded(_Wrapped, 1)
    with infinity.offload(model, nvme) as offloaded:
        offloaded.load(tmp_path / "saved")
        assert model.inner.passes == 1
        average = model.inner.average
        assert average is not None
        assert average.dtype == torch.float64
        assert _train(offloaded, 1) == expected


def test_buffers_that_were_none_when_saved_are_none_again(nvme: Path, tmp_path: Path) -> None:
    model = seeded(_Wrapped)
    with infinity.offload(model, nvme) as offloaded:
        offloaded.save(tmp_path / "saved")
        expected = _train(offloaded, 1)
        offloaded.load(tmp_path / "saved")
        assert model.inner.average is None
        assert model.inner.passes == 0
        assert _train(offloaded, 1) == expected


def test_buffers_of_the_checkpoint_or_the_model_alone_are_refused_by_name(
    nvme: Path, tmp_path: Path
) -> None:
    for name, buffers in (("with", {"scale": torch.ones(3)}), ("without", {})):
        with infinity.offload(_Wrapped(**buffers), nvme) as offloaded:
            offloaded.save(tmp_path / name)
            if name == "with":
                continue
            with pytest.raises(ValueError, match="has a buffer scale, which the model has not"):
                offloaded.load(tmp_path / "with")
    with (
        infinity.offload(_Wrapped(scale=torch.ones(3)), nvme) as offloaded,
        pytest.raises(ValueError, match="has no buffer scale, which the model has"),
    ):
        offloaded.load(tmp_path / "without")


def test_extra_state_of_one_side_alone_is_refused_by_name(nvme: Path, tmp_path: Path) -> None:
    with infinity.offload(_Wrapped(), nvme) as offloaded:
        offloaded.save(tmp_path / "saved")
    tree = checkpoint.load(tmp_path / "saved")
    del tree["infinity"]["module_states"]["inner._extra_state"]
    checkpoint.save(tree, tmp_path / "other")
    with (
        infinity.offload(_Wrapped(), nvme) as offloaded,
        pytest.raises(ValueError, match=r"the model has inner\._extra_state, .*other has not"),
    ):
        offloaded.load(tmp_path / "other")


def test_checkpoint_that_does_not_tell_of_buffers_loads_with_a_warning_of_extra_state(
    nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with infinity.offload(seeded(_Wrapped), nvme) as offloaded:
        _train(offloaded, 0)
        offloaded.save(tmp_path / "saved")
    tree = checkpoint.load(tmp_path / "saved")
    del tree["infinity"]["buffers"], tree["infinity"]["module_states"]
    checkpoint.save(tree, tmp_path / "saved")
    model = seeded(_Wrapped, 1)
    with infinity.offload(model, nvme) as offloaded:
        offloaded.load(tmp_path / "saved")
        assert model.inner.average is not None
    assert torch.equal(model.inner.average, tree["model"]["inner.average"])
    assert "these modules keep what they have: inner._extra_state" in caplog.text


def test_save_between_backward_and_step_warns_of_the_gradients(
    nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _Wrapped()
    with infinity.offload(model, nvme) as offloaded:
        _train(offloaded, 0)
        offloaded.save(tmp_path / "saved")
        assert "gradients" not in caplog.text
        model(torch.ones(1, WIDTH)).sum().backward()
        offloaded.save(tmp_path / "saved")
    assert "saved without the gradients that 2 parameters have accumulated" in caplog.text


class _Measured(nn.Module):
    """With a metric, whose state is in state dicts where it is ``kept``."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.metrics = MetricCollection({"mean": MeanMetric(), "each": CatMetric()})
        self.metrics.persistent(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.metrics.update(y.detach().mean())
        return y


@pytest.mark.parametrize("by", ["save", "snapshot"])
@pytest.mark.parametrize("kept", [True, False])
def test_what_a_metric_writes_into_state_dicts_comes_back(
    kept: bool, by: str, tmp_path: Path
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    model = seeded(lambda: _Measured(kept))
    with infinity.offload(model, nvme) as offloaded:
        for number in range(3):
            _train(offloaded, number)
        offloaded.save(tmp_path / "saved") if by == "save" else offloaded.snapshot("taken")
        before = model.metrics.compute()
    model = seeded(lambda: _Measured(True), 1)
    with infinity.offload(model, nvme) as offloaded:
        _train(offloaded, 9)
        now = model.metrics.compute()
        offloaded.load(tmp_path / "saved") if by == "save" else offloaded.restore("taken")
        for metric in model.metrics.values():
            metric._computed = None  # as after torch's own load_state_dict
        after = model.metrics.compute()
    expected = before if kept else now
    assert after.keys() == expected.keys()
    assert all(after[name].equal(expected[name]) for name in expected)
