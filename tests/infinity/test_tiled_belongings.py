"""What layers have beside values while they are tiled, and after."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from tests.support.models import is_in_tiles
from tests.support.training import WHOLE, same_values

BOUND = 256 * 1024
WIDTH, INNER = 256, 600


class Net(nn.Module):
    """Two large layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up: Any = nn.Linear(WIDTH, INNER)
        self.down: Any = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    result: torch.Tensor = model(x).square().mean()
    return result


def kind(module: object) -> object:
    return type(module)


def offload(model: nn.Module, nvme: Path, **options: Any) -> Any:
    return infinity.offload(
        model, nvme, host_memory=WHOLE, **{"max_parameter_bytes": BOUND, **options}
    )


def _hook(model: Any) -> None:
    model.up.weight.register_hook(lambda gradient: gradient * 0)


def _sparse_gradient(model: Any) -> None:
    model.up.weight.grad = torch.eye(INNER, WIDTH).to_sparse()


def _forward(model: Any) -> None:
    model.up.forward = functools.partial(nn.Linear.forward, model.up)


def _child(model: Any) -> None:
    model.up.tiles = nn.Identity()


def _old_norm(model: Any) -> None:
    nn.utils.spectral_norm(model.up)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_old_norm, "of a Linear, which is cut by its weight alone"),
        (_hook, "a parameter with hooks"),
        (_sparse_gradient, "sparse or of another dtype"),
        (_forward, "of a Linear with a forward of its own"),
        (_child, "of a Linear that has something called 'tiles'"),
    ],
)
def test_a_layer_that_cannot_be_cut_stays_whole(
    change: Callable[[Any], None], reason: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    change(model)
    with caplog.at_level(logging.WARNING), offload(model, nvme):
        assert not is_in_tiles(model.up)
        assert is_in_tiles(model.down)
    assert reason in caplog.text


def test_modules_are_initialised_as_without_tiles(nvme: Path) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0.5)

    found = []
    for bound in (None, BOUND):
        model = Net()
        with offload(model, nvme, max_parameter_bytes=bound) as offloaded:
            torch.manual_seed(1)
            with offloaded.gathered(modify=True):
                model.apply(init)
                model.down.reset_parameters()
        found.append(model.state_dict())
    assert same_values(*found)


def test_a_function_that_is_applied_to_modules_sees_the_weight_and_no_tiles(nvme: Path) -> None:
    def shrink(module: Any) -> None:
        if getattr(module, "weight", None) is not None:
            seen.append(tuple(module.weight.shape))
            nn.init.xavier_uniform_(module.weight)
            module.weight.data.mul_(0.5)

    found, shapes = [], []
    seen: list[tuple[int, ...]]
    for bound in (None, BOUND):
        model, seen = Net(), []
        with offload(model, nvme, max_parameter_bytes=bound) as offloaded:
            torch.manual_seed(1)
            with offloaded.gathered(modify=True):
                model.apply(shrink)
        found.append(model.state_dict())
        shapes.append(seen)
    assert shapes[0] == shapes[1]
    assert same_values(*found)


def _own(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def _all(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            nn.init.xavier_uniform_(parameter)


def _of_children(module: nn.Module) -> None:
    for child in module.children():
        for parameter in child.parameters(recurse=False):
            parameter.data.mul_(0.5)


def _by_dictionary(module: nn.Module) -> None:
    for parameter in [*module._parameters.values(), *dict(module._parameters.items()).values()]:
        assert parameter is not None
        parameter.data.add_(1)
    assert list(module._parameters.keys()) == list(dict(module.named_parameters(recurse=False)))


def _by_state_dict(module: nn.Module) -> None:
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})


def _frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    "change", [_own, _all, _of_children, _by_dictionary, _by_state_dict, _frozen]
)
def test_a_function_that_is_applied_walks_over_parameters_as_without_tiles(
    nvme: Path, change: Callable[[nn.Module], None]
) -> None:
    plain, model = Net(), Net()
    torch.manual_seed(1)
    plain.apply(change)
    with offload(model, nvme) as offloaded:
        torch.manual_seed(1)
        with offloaded.gathered(modify=True):
            model.apply(change)
        assert is_in_tiles(model.up)
        assert "up.tiles.0.weight" in dict(model.named_parameters())
    assert same_values(plain.state_dict(), model.state_dict())
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.requires_grad == expected.requires_grad
    assert "apply" not in vars(model) | vars(model.up)


def test_modules_that_reset_all_of_their_parameters_do_so_as_without_tiles(nvme: Path) -> None:
    """Weights were drawn by the rows of tiles."""
    found = []
    for bound in (None, BOUND):
        model = nn.Transformer(WIDTH, 4, 1, 1, INNER, batch_first=True)
        with offload(model, nvme, max_parameter_bytes=bound) as offloaded:
            torch.manual_seed(1)
            with offloaded.gathered(modify=True):
                model._reset_parameters()
        found.append({k: v for k, v in model.state_dict().items() if v.dim() > 1})
        assert "_reset_parameters" not in vars(model)
    assert same_values(*found)


class Referring(Net):
    """With a weight of a layer beside its own parameters, and methods that take no instance."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["referred"] = self.up.weight

    @staticmethod
    def _reset_parameters(layer: nn.Module) -> None:
        _of_children(nn.Sequential(layer))

    @classmethod
    def reset_parameters(cls, layer: nn.Module) -> None:
        cls._reset_parameters(layer)


def test_what_a_module_refers_to_is_not_walked_over_as_its_own(nvme: Path) -> None:
    """It was changed twice, with tiles alone."""
    plain, model = Referring(), Referring()
    plain.apply(_of_children)
    with offload(model, nvme) as offloaded, offloaded.gathered(modify=True):
        model.apply(_of_children)
        model.apply(_by_dictionary)
    plain.apply(_by_dictionary)
    assert same_values(plain.state_dict(), model.state_dict())


def test_methods_of_classes_that_reset_parameters_take_what_they_do_without_tiles(
    nvme: Path,
) -> None:
    plain, model = Referring(), Referring()
    plain._reset_parameters(plain.up)
    plain.reset_parameters(plain.down)
    with offload(model, nvme) as offloaded, offloaded.gathered(modify=True):
        model._reset_parameters(model.up)
        model.reset_parameters(model.down)
    assert same_values(plain.state_dict(), model.state_dict())


def test_a_function_that_raises_as_it_is_applied_leaves_the_tiles(nvme: Path) -> None:
    def fail(module: nn.Module) -> None:
        raise KeyError(type(module).__name__)

    model = Net()
    with offload(model, nvme):
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(KeyError):
            model.apply(fail)
        assert [name for name, _ in model.named_parameters()] == names


def test_gradients_brought_to_a_tiled_layer_are_accumulated_to(nvme: Path) -> None:
    norms = []
    for bound in (None, BOUND):
        model = Net()
        (1e3 * loss(model)).backward()
        with offload(model, nvme, max_parameter_bytes=bound) as offloaded:
            loss(model, 1).backward()
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        assert model.up.weight.grad is None
    assert norms[1] == pytest.approx(norms[0])


def test_entering_that_fails_gives_a_tiled_layer_its_gradients_back(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    loss(model).backward()
    before = model.up.weight.grad

    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("infinity.autograd.module_hooks.ModelHooks.attach", fail)
    with pytest.raises(RuntimeError, match="no luck"), offload(model, nvme):
        pass
    assert before is not None
    assert model.up.weight.grad is before


def test_what_a_program_does_to_a_tiled_layer_outlasts_the_block(nvme: Path) -> None:
    model: Any = Net()
    model.up.note = "before"
    model.up.register_buffer("scale", torch.ones(3))
    calls: list[int] = []
    with offload(model, nvme):
        assert kind(model.up) is nn.Linear
        assert is_in_tiles(model.up)
        assert (model.up.note, model.up.scale.tolist()) == ("before", [1.0] * 3)
        model.up.note = "after"
        del model.up.scale
        model.up.register_buffer("shift", torch.zeros(2))
        model.up.requires_grad_(False)
        handle = model.down.register_forward_hook(lambda *_: calls.append(1))
        loss(model)
    assert kind(model.up) is nn.Linear
    assert not any(parameter.requires_grad for parameter in model.up.parameters())
    assert all(parameter.requires_grad for parameter in model.down.parameters())
    assert [*model.up.state_dict()] == ["weight", "bias", "shift"]
    assert model.up.note == "after"
    loss(model)
    handle.remove()
    loss(model)
    assert len(calls) == 2


def test_marks_of_a_program_have_the_names_that_it_gives_them(nvme: Path) -> None:
    model: Any = Net()
    weight = model.up.weight
    marks = {
        "_name": "own",
        "_owner": "me",
        "_tiles": 3,
        "_at": 1,
        "part": "encoder",
        "whole": True,
    }
    vars(weight).update(marks)
    with offload(model, nvme):
        assert is_in_tiles(model.up)
        assert vars(model.up.weight).items() >= marks.items()
        loss(model).backward()
        assert model.up.weight.grad.isfinite().all()
        assert model.up.weight.norm().isfinite()
        assert model.up.weight.data.shape == weight.shape
    assert model.up.weight is weight
    assert vars(weight) == marks


def test_attributes_with_the_rows_of_a_weight_are_cut_with_it(nvme: Path) -> None:
    class Masked(torch.optim.SGD):
        """Updates only what the mask of a parameter shows, by a rate for each row."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    mask = getattr(parameter, "mask", 1.0)
                    parameter.sub_(mask * parameter.grad * getattr(parameter, "rate", 1.0))

    model: Any = Net()
    before = model.up.weight.detach().clone()
    model.up.weight.mask = mask = torch.rand(INNER, WIDTH) < 0.5
    model.up.weight.rate = rate = torch.randint(2, (INNER, 1)).float()
    with offload(model, nvme, optimizer=lambda p: Masked(p, lr=1.0)) as offloaded:
        assert is_in_tiles(model.up)
        loss(model).backward()
        offloaded.step()
    changed = model.up.weight.detach() != before
    assert changed.any()
    assert not (changed & ~(mask & (rate != 0))).any()
