"""Buffers on the meta device: what modules compute is computed, what has no values is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity

WIDTH = 8


class Rotary(nn.Module):
    """Frequencies that are in no checkpoint, and a count of one byte for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", self.compute(), persistent=False)
        self.register_buffer("ones", torch.ones(3, dtype=torch.bool), persistent=False)

    frequencies: torch.Tensor
    ones: torch.Tensor

    def compute(self) -> torch.Tensor:
        return 1.0 / 10_000 ** torch.linspace(0, 1, WIDTH)

    def fill(self) -> None:
        self.frequencies.copy_(self.compute())
        self.ones.fill_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.frequencies * self.ones.sum()
        return result


class Resetting(Rotary):
    def reset_parameters(self) -> None:
        self.fill()


class Model(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rotary = rotary
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.rotary(self.first(x)))
        return result


class Initialising(Model):
    """As Hugging Face models do."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.fill()


class Strided(Rotary):
    """Sets its buffers anew: every other element of something, and a column of a single row."""

    def reset_parameters(self) -> None:
        self.frequencies = self.compute().repeat_interleave(2)[::2]
        self.ones = torch.ones(1, 3, dtype=torch.bool)[:, 0].expand(3)


class Column(Rotary):
    def reset_parameters(self) -> None:
        self.fill()
        self.one = torch.full((1, 3), 2.0)[:, 0]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.full((1,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x) * self.one
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reset_parameters": lambda: Model(Resetting()),
    "strided": lambda: Model(Strided()),
    "column": lambda: Model(Column()),
    "_init_weights": lambda: Initialising(Rotary()),
    "batch norm": lambda: Model(nn.BatchNorm1d(WIDTH)),
}


def _output(
    make: Callable[[], nn.Module], nvme: Path, *, weights: Path | None = None
) -> list[torch.Tensor]:
    """What a model on meta makes of ones, and the random numbers that come next."""
    model = make().to("meta")
    torch.manual_seed(1)
    with infinity.offload(
        model, nvme, weights=weights, optimizer=None, host_memory="64MiB", device="cpu"
    ):
        assert not any(buffer.is_meta for buffer in model.buffers())
        found = [model.eval()(torch.ones(4, WIDTH))]
    # Weights are drawn in the same order whatever else is computed.
    return [*found, torch.rand(3)]


@pytest.mark.parametrize("name", MODELS)
def test_buffers_that_a_module_computes_need_no_file(tmp_path: Path, name: str) -> None:
    make = MODELS[name]
    torch.manual_seed(2)
    plain = make()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    (tmp_path / "nvme").mkdir()
    found, _ = _output(make, tmp_path / "nvme", weights=tmp_path / "weights.safetensors")
    assert torch.equal(found, plain.eval()(torch.ones(4, WIDTH)))


@pytest.mark.parametrize("name", MODELS)
def test_computing_buffers_draws_no_random_numbers(tmp_path: Path, name: str) -> None:
    with_buffers = _output(MODELS[name], tmp_path)
    without = _output(lambda: Model(nn.Identity()), tmp_path)
    assert torch.equal(with_buffers[1], without[1])
    assert not torch.equal(with_buffers[0], without[0]) or name == "batch norm"


def test_buffer_that_the_weights_should_hold_is_not_made_up(tmp_path: Path) -> None:
    state = Model(nn.BatchNorm1d(WIDTH)).state_dict()
    del state["rotary.running_var"]
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"rotary\.running_var is on the meta device and not in"):
        _output(MODELS["batch norm"], tmp_path, weights=tmp_path / "weights.safetensors")


class Partly(Resetting):
    def fill(self) -> None:
        self.ones.fill_(True)
        self.frequencies[:-1] = 1.0


class Doubling(Resetting):
    def fill(self) -> None:
        self.ones.fill_(True)
        self.frequencies.mul_(2.0)


@pytest.mark.parametrize("kind", [Partly, Doubling])
def test_buffer_that_is_not_computed_as_a_whole_is_refused(
    tmp_path: Path, kind: type[Rotary]
) -> None:
    with pytest.raises(ValueError, match=rf"rotary\.frequencies .* no values: {kind.__name__} "):
        _output(lambda: Model(kind()), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_computing_one_buffer_leaves_a_real_one_beside_it_alone(tmp_path: Path) -> None:
    model = Model(nn.BatchNorm1d(WIDTH)).to("meta")
    trained = torch.arange(1.0, WIDTH + 1)
    model.rotary._buffers["running_mean"] = trained.clone()
    save_file(
        {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        | {"rotary.running_var": torch.ones(WIDTH)},
        tmp_path / "weights.safetensors",
    )
    model.rotary._non_persistent_buffers_set.add("num_batches_tracked")
    (tmp_path / "nvme").mkdir()
    with infinity.offload(
        model,
        tmp_path / "nvme",
        weights=tmp_path / "weights.safetensors",
        optimizer=None,
        host_memory="64MiB",
        device="cpu",
    ):
        buffers = dict(model.named_buffers())
        assert torch.equal(buffers["rotary.running_mean"], trained)
        assert buffers["rotary.num_batches_tracked"].item() == 0
