"""Parameters on the meta device: every function that initialises them runs, in place and in order,
and what none of them sets is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import infinity
from tests.support.training import same_bits

WIDTH = 8


def _values(model: nn.Module, nvme: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    with (
        infinity.offload(model, nvme, optimizer=None, host_memory="64MiB") as offloaded,
        offloaded.gathered(),
    ):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Parent(nn.Module):
    """Initialises what its children have, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.last = nn.Linear(WIDTH, WIDTH)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(1.0)
        elif isinstance(module, Attention):
            assert module.query.in_features == WIDTH
            module.query.weight.data[1:] *= 3.0
            module.scale.data.zero_()
        elif module is self:
            module.last.weight[0].zero_()


def test_parent_changes_what_its_child_has_set(nvme: Path) -> None:
    values = _values(Parent().to("meta"), nvme)
    assert values["attention.query.weight"].unique().tolist() == [1.0, 3.0]
    assert not values["attention.query.weight"][0].ne(1.0).any()
    assert not values["attention.scale"].any()
    assert values["last.weight"].sum(1).tolist() == [0.0, *[WIDTH] * (WIDTH - 1)]


def test_model_in_a_wrapper_initialises_itself(nvme: Path) -> None:
    values = _values(nn.Sequential(Parent(), nn.Linear(WIDTH, WIDTH)).to("meta"), nvme)
    assert values["0.attention.query.weight"].unique().tolist() == [1.0, 3.0]
    assert values["1.weight"].unique().numel() == WIDTH * WIDTH


def test_real_parameters_stay_what_they_are(nvme: Path) -> None:
    model = Parent()
    trained = torch.randn(WIDTH, WIDTH)
    model.to("meta")
    model.last.weight = nn.Parameter(trained.clone())
    model.attention.scale = nn.Parameter(trained[0].clone())
    values = _values(model, nvme)
    assert same_bits(values["last.weight"], trained)
    assert same_bits(values["attention.scale"], trained[0])
    assert values["attention.query.weight"].unique().tolist() == [1.0, 3.0]
    assert same_bits(model.last.weight, trained)


class Resetting(nn.Module):
    """Resets its children again, as modules of graph networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def reset_parameters(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.reset_parameters()  # type: ignore[operator]
            nn.init.constant_(layer.bias, float(number))  # type: ignore[arg-type]


def test_reset_parameters_reaches_children(nvme: Path) -> None:
    values = _values(Resetting().to("meta"), nvme)
    assert [values[f"layers.{n}.bias"].tolist() for n in range(2)] == [[0.0] * 8, [1.0] * 8]
    assert values["layers.0.weight"].unique().numel() == WIDTH * WIDTH


def _normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(64, 64)))


SAME_SPREAD: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "weight norm": _normed,
    "bfloat16": lambda: nn.Linear(32, 32, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", SAME_SPREAD)
def test_modules_of_torch_are_as_their_constructors_make_them(name: str, nvme: Path) -> None:
    plain = SAME_SPREAD[name]()
    with torch.device("meta"):
        model = SAME_SPREAD[name]()
    found = _values(model, nvme)
    for key, expected in plain.named_parameters():
        if expected.numel() < 2 or expected.std() == 0:
            assert same_bits(found[key], expected), key
        else:
            error = 5 / (2 * expected.numel()) ** 0.5
            spread = expected.std().item()
            assert found[key].float().std().item() == pytest.approx(spread, rel=error), key


class Unset(Parent):
    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self.function = function
        self.extra = nn.Parameter(torch.ones(WIDTH, 2))

    def reset_parameters(self) -> None:
        self.function(self)


UNSET: dict[str, tuple[Callable[[Any], object], str]] = {
    "never": (lambda module: None, r"extra is on the meta device and has no reset_parameters"),
    "in part": (lambda module: module.extra[1:].zero_(), "extra .* not all of it is set"),
    "from what was there": (lambda module: module.extra.mul_(2.0), "extra .* not all of it is set"),
    "from another": (
        lambda module: module.extra.copy_(module.last.weight[:, :2]),
        "extra cannot be initialised without other parts",
    ),
}


@pytest.mark.parametrize("name", UNSET)
def test_parameter_that_has_no_values_is_refused_by_name(name: str, nvme: Path) -> None:
    function, message = UNSET[name]
    model = Unset(function).to("meta")
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=rf"{message}.*weights="):
        _values(model, nvme)
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
