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
from infinity.values.module_state import module_states, set_module_states
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


class _Scale(nn.Module):
    """Writes what it is told into state dicts, which of its first version was half of it."""

    _version = 2
    known: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.ones(1))
        self.scale, self.product = torch.ones(3), torch.ones(3)
        self.register_load_state_dict_post_hook(lambda *_: self._multiply())

    def _multiply(self) -> None:
        self.product = self.scale * self.known

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, *told: Any
    ) -> None:
        scale = state.pop(f"{prefix}scale") * (1 if metadata.get("version", 1) > 1 else 2)
        if state[f"{prefix}known"] < 0 or scale.shape != self.scale.shape:
            told[-1].append(f"{prefix}scale is of another shape")
        else:
            self.scale = scale
        super()._load_from_state_dict(state, prefix, metadata, strict, *told)


class _Hooked(nn.Module):
    """Has hooks that do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)
        self.register_state_dict_post_hook(self._write)
        self.register_load_state_dict_pre_hook(self._read)

    @staticmethod
    def _write(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}scale"] = module.scale

    @staticmethod
    def _read(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.scale = state.pop(f"{prefix}scale")


@pytest.mark.parametrize("make", [_Scale, _Hooked])
def test_what_a_module_writes_is_taken_as_by_load_state_dict(
    make: type[Any], nvme: Path, tmp_path: Path
) -> None:
    saved, plain, ours = make(), make(), make()
    saved.scale = torch.tensor([3.0, 4.0, 5.0])
    plain.load_state_dict(saved.state_dict())
    model = nn.Sequential(nn.Linear(8, 8), saved)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "saved")
    model = nn.Sequential(nn.Linear(8, 8), ours)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        offloaded.load(tmp_path / "saved")
    assert torch.equal(plain.scale, saved.scale)
    for name in {"scale", "product"} & vars(plain).keys():
        assert torch.equal(getattr(ours, name), getattr(plain, name))


def test_what_a_module_does_not_take_of_what_it_wrote_is_told(nvme: Path, tmp_path: Path) -> None:
    scale = _Scale()
    model = nn.Sequential(nn.Linear(8, 8), scale)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        offloaded.save(tmp_path / "saved")
        scale.scale = torch.ones(4)
        with pytest.raises(ValueError, match="1 does not take what was saved of it: scale is of"):
            offloaded.load(tmp_path / "saved")
    assert scale.scale.shape == (4,)


def test_what_a_module_wrote_is_given_on_the_device_that_it_was_on() -> None:
    metric = MeanMetric()
    metric.persistent(True)
    model = nn.Sequential(metric)
    states = module_states(model)
    (told,) = states.values()
    assert told["on_device"] == []
    told["on_device"] = ["weight"]  # as where it was on a GPU
    set_module_states(model, states, torch.device("meta"))
    devices = {name: getattr(metric, name).device.type for name in told["state"]}
    assert devices == {"mean_value": "cpu", "weight": "meta"}
