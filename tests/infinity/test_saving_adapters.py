"""Checkpoints without what is frozen: of adapters alone, over the same base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from tests.support.models import Gpt, seeded, token_loss
from tests.support.training import same_bits, values_of

Make = Callable[[], nn.Module]


class Adapted(nn.Module):
    """A frozen model and a low-rank addition to its head."""

    def __init__(self, base_seed: int = 0) -> None:
        super().__init__()
        self.base = seeded(Gpt, base_seed)
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
        self.base.register_buffer("counted", torch.zeros(3))
        self.down = nn.Linear(256, 8, bias=False)
        self.up = nn.Linear(8, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.base(tokens)
        added: torch.Tensor = self.up(self.down(logits))
        return logits + added


def _train(model: nn.Module, offloaded: infinity.OffloadedModel, *batches: int) -> None:
    for batch in batches:
        offloaded.backward(token_loss(model, batch))
        offloaded.step()


def _run(nvme: Path, act: Callable[[Any, Any], Any], make: Make = Adapted, **options: Any) -> Any:
    model = seeded(make)
    with infinity.offload(model, nvme, host_memory=1 << 30, **options) as offloaded:
        act(model, offloaded)
    return values_of(model)


@pytest.mark.parametrize("block", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_adapters_alone_go_on_to_the_same_bits(
    block: bool, dtype: torch.dtype | None, nvme: Path, tmp_path: Path
) -> None:
    def first(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
        _train(model, offloaded, 0, 1)
        pending = offloaded.save(tmp_path / "saved", block, {"a": 1}, only_trainable=True)
        _train(model, offloaded, 2)
        if not block:
            pending.result()

    def resumed(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
        assert offloaded.load(tmp_path / "saved") == {"a": 1}
        _train(model, offloaded, 2)

    whole = _run(nvme, first, compute_dtype=dtype)
    found = _run(nvme, resumed, compute_dtype=dtype)
    assert all(same_bits(value, found[name]) for name, value in whole.items())
    names = checkpoint.list_tensors(tmp_path / "saved")
    weights = {name for name in names if name.startswith("model.")}
    assert weights == {"model.up.weight", "model.down.weight", "model.base.counted"}
    size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert size < 300_000


def test_adapters_over_another_base_are_refused_and_nothing_is_changed(
    nvme: Path, tmp_path: Path
) -> None:
    _run(nvme, lambda _, offloaded: offloaded.save(tmp_path / "saved", only_trainable=True))

    def load(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
        with pytest.raises(ValueError, match=r"over a model with other values of base\."):
            offloaded.load(tmp_path / "saved")

    other = _run(nvme, load, lambda: Adapted(base_seed=1))
    assert all(
        same_bits(value, other[name])
        for name, value in values_of(seeded(lambda: Adapted(base_seed=1))).items()
    )


def test_adapters_alone_are_no_weights_of_the_whole(nvme: Path, tmp_path: Path) -> None:
    _run(nvme, lambda _, offloaded: offloaded.save(tmp_path / "saved", only_trainable=True))
    with pytest.raises(ValueError, match=r"base\.embedding"):
        infinity.offload(Adapted(), nvme, weights=tmp_path / "saved").__enter__()


def test_without_anything_trained_there_is_nothing_to_save(nvme: Path, tmp_path: Path) -> None:
    def act(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
        with pytest.raises(ValueError, match="no parameter of the model is trained"):
            offloaded.save(tmp_path / "saved", only_trainable=True)

    _run(nvme, act, lambda: Adapted().requires_grad_(False))
    assert not (tmp_path / "saved").exists()


def test_data_goes_to_stripe_directories(nvme: Path, tmp_path: Path) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()

    def act(model: nn.Module, offloaded: infinity.OffloadedModel) -> None:
        offloaded.save(tmp_path / "saved", stripe_dirs=stripes)
        offloaded.load(tmp_path / "saved")

    _run(nvme, act)
    assert all(any(stripe.rglob("*.safetensors")) for stripe in stripes)
