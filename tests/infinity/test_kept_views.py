"""Views that a program keeps: they show what they would in memory, or an error names what they are
of.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import same_bits

VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda gradient: gradient.view(-1),
    "row": lambda gradient: gradient[0],
    "row of a view": lambda gradient: gradient.t()[0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_of_a_gradient_is_refused_after_another_backward(
    name: str, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        weight: Any = model.layer(0).weight
        vector_loss(model, 0).backward()
        view = VIEWS[name](weight.grad)
        first = view.clone()
        vector_loss(model, 1).backward()
        assert view.shape == first.shape, "it can be looked at"
        for use in (lambda: view + 1, lambda: view[0], view.tolist, view.sum):
            with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*before the gradient"):
                use()
        assert not torch.equal(VIEWS[name](weight.grad).clone(), first)


@pytest.mark.parametrize(
    "change",
    [
        lambda offloaded, weight: offloaded.clip_grad_norm_(1e-9),
        lambda offloaded, weight: torch.nn.utils.clip_grad_norm_([weight], 1e-9),
        lambda offloaded, weight: weight.grad.mul_(2),
        lambda offloaded, weight: weight.grad.zero_(),
    ],
    ids=["clip", "torch's clip", "mul_", "zero_"],
)
def test_view_of_a_gradient_is_refused_after_a_change_in_place(
    change: Callable[[Any, Any], Any], host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight: Any = model.layer(0).weight
        vector_loss(model, 0).backward()
        view = weight.grad.view(-1)
        change(offloaded, weight)
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*take it anew"):
            _ = view * 1


def test_view_of_a_cleared_gradient_keeps_its_values(host_memory: int, nvme: Path) -> None:
    """As in memory, where the next gradient is another tensor."""
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight: Any = model.layer(0).weight
        vector_loss(model, 0).backward()
        view = weight.grad.view(-1)
        kept = view.clone()
        offloaded.step()
        vector_loss(model, 1).backward()
        assert same_bits(view.clone(), kept)
        assert view.sum() == kept.sum()


def test_view_of_a_gradient_in_tiles_is_refused_after_another_backward(nvme: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 1024))
    options: dict[str, Any] = {"host_memory": "1GiB", "max_parameter_bytes": 512 << 10}
    with infinity.offload(model, nvme, **options):
        weight: Any = model[0].weight
        assert type(weight).__name__ == "TiledWeight"
        model(torch.ones(2, 256)).sum().backward()
        view = weight.grad.view(-1)
        view.sum()
        model(torch.ones(2, 256)).sum().backward()
        with pytest.raises(RuntimeError, match=r"0\.weight.*take it anew"):
            view.sum()


def _step(offloaded: Any, model: Any) -> None:
    vector_loss(model, 1).backward()
    offloaded.step()


def _modify(offloaded: Any, model: Any) -> None:
    weight = model.layer(0).weight
    with offloaded.gathered([weight], modify=True), torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("change", [_step, _modify])
@pytest.mark.parametrize("name", VIEWS)
def test_view_of_a_weight_with_a_gradient_is_refused_after_a_change(
    name: str, change: Callable[[Any, Any], None], host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight: Any = model.layer(0).weight
        view = VIEWS[name](weight)
        assert view.requires_grad
        for _ in range(2):
            (view * 2).sum().backward()  # until then it is used as often as one likes
        change(offloaded, model)
        for use in (lambda: view * 2, lambda: view.detach().sum(), view.tolist):
            with pytest.raises(RuntimeError, match=r"view of layers\.0\.weight.*take it anew"):
                use()
        assert same_bits(VIEWS[name](weight).detach(), VIEWS[name](weight.detach()))


def test_view_of_a_weight_is_refused_after_the_block(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        view = model.layer(0).weight.t()
    with pytest.raises(RuntimeError, match=r"view of layers\.0\.weight.*take it anew"):
        _ = view * 2


def test_view_of_a_weight_that_a_step_left_alone_stays(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        view = model.layer(0).weight.t()
        model.layer(1).weight.square().sum().backward()
        offloaded.step()
        view.sum().backward()
        gradient = offloaded.gradient(model.layer(0).weight)
        assert gradient is not None
        assert gradient.eq(1).all()


def test_views_of_a_view_without_history_are_copies(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        weight = model.layer(0).weight
        row = weight.t().detach()[0]
        before = row.clone()
        _step(offloaded, model)
        assert same_bits(row, before)
        assert not torch.equal(weight.t().detach()[0], before)


def test_view_of_a_weight_is_differentiated_by(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory):
        row = model.layer(0).weight.t()[0]
        (gradient,) = torch.autograd.grad((row * 3).sum(), row)
        assert gradient.eq(3).all()


class _Counting(nn.Module):
    def __init__(self, mean: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", mean)

    mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += 1.5
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_view_of_a_buffer_from_before_the_block_has_its_values_after(
    compute_dtype: torch.dtype | None, nvme: Path
) -> None:
    mean = torch.zeros(4)
    view = mean[:2]
    model = nn.Sequential(_Counting(mean), _Counting(mean))
    options: dict[str, Any] = {"host_memory": "64MiB", "compute_dtype": compute_dtype}
    with infinity.offload(model, nvme, **options) as offloaded:
        inside = model.get_buffer("0.mean")[:2]
        for passes in (1, 2):
            model(torch.ones(2, 8)).sum().backward()
            offloaded.step()
            assert inside.tolist() == [3.0 * passes] * 2, "a buffer of two modules is one"
    assert view.tolist() == [6.0] * 2
    assert model[0].mean is mean
    assert model[1].mean is mean


def test_buffer_that_a_program_put_in_place_of_another_leaves_that_alone(nvme: Path) -> None:
    mean = torch.zeros(4)
    model = _Counting(mean)
    options: dict[str, Any] = {"host_memory": "64MiB", "compute_dtype": torch.bfloat16}
    with infinity.offload(model, nvme, **options):
        model.mean = torch.ones(4)
    assert mean.tolist() == [0.0] * 4
    assert model.mean.tolist() == [1.0] * 4
