"""Gradients of ``backward(create_graph=True)``, and what is computed from ``p.grad``."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Stack, first_weight, seeded
from tests.support.models import vector_loss as loss_of_width
from tests.support.training import same_bits

# What torch recommends is what is not done here.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward")
REFUSED = r"gradient of layers\.0\.weight, .* cannot be differentiated: .*torch\.autograd\.grad"


WIDTH = 384
"""Of which tiles can be made."""

make = partial(Stack, WIDTH, 3)
vector_loss = partial(loss_of_width, width=WIDTH)


def _penalty(model: nn.Module) -> torch.Tensor:
    gradient = first_weight(model).grad
    assert gradient is not None
    return gradient.square().sum()


def _backward(model: nn.Module) -> Any:
    (vector_loss(model, 1) + _penalty(model)).backward()


def _by_others(model: nn.Module) -> Any:
    others = [p for name, p in model.named_parameters() if name != "layers.0.weight"]
    return torch.autograd.grad(vector_loss(model, 1) + _penalty(model), others)


def _of_itself(model: nn.Module) -> Any:
    gradient = first_weight(model).grad
    assert gradient is not None
    return torch.autograd.grad(gradient, list(model.parameters()), torch.ones_like(gradient))


def _of_a_view(model: nn.Module) -> Any:
    gradient = first_weight(model).grad
    assert gradient is not None
    (vector_loss(model, 1) + gradient[0].sum()).backward()


@pytest.mark.parametrize("use", [_backward, _by_others, _of_itself, _of_a_view])
@pytest.mark.parametrize(
    "how",
    [
        *("backward", "accumulated", "assigned", "added", "copied", "a row", "overwritten"),
        *("copied from another", "added from a view"),
    ],
)
def test_a_gradient_is_not_differentiated_as_if_it_were_a_constant(
    how: str, use: Callable[[nn.Module], Any], nvme: Path
) -> None:
    model = seeded(make)
    with infinity.offload(model, nvme, host_memory="1GiB"):
        loss = vector_loss(model, 0)
        if how in ("added", "copied", "a row"):
            loss.backward()
            ours = first_weight(model).grad
            assert ours is not None
            other = model.get_parameter("layers.1.weight")
            if how == "a row":
                ours[0] = first_weight(model)[0] * other[0]
            else:
                (ours.add_ if how == "added" else ours.copy_)(first_weight(model) * other)
        elif how == "assigned":
            gradients = torch.autograd.grad(loss, [first_weight(model)], create_graph=True)
            first_weight(model).grad = gradients[0]
        else:
            loss.backward(create_graph=True)
        if how == "accumulated":
            vector_loss(model, 2).backward()
        if "from" in how:
            ours, theirs = (model.get_parameter(f"layers.{at}.weight").grad for at in (0, 1))
            assert ours is not None
            assert theirs is not None
            ours.detach_()
            ours.copy_(theirs) if how.startswith("copied") else ours.add_(theirs[:])
        if how == "overwritten":  # which leaves the history as it is, in memory too
            ours = first_weight(model).grad
            assert ours is not None
            with torch.no_grad():
                ours.copy_(torch.ones_like(ours))
            ours.data.mul_(2.0)
        with pytest.raises(RuntimeError, match=REFUSED):
            use(model)
        model.zero_grad()


@pytest.mark.parametrize("tiled", [False, True])
def test_what_does_not_differentiate_it_has_the_bits_of_plain_torch(
    tiled: bool, nvme: Path
) -> None:
    model = seeded(make)
    plain = copy.deepcopy(model)
    given: dict[str, Any] = {"max_parameter_bytes": 1 << 18} if tiled else {}

    def use(model: nn.Module) -> list[torch.Tensor]:
        seen = []
        for number in range(2):
            vector_loss(model, number).backward(create_graph=True)
            gradient = first_weight(model).grad
            assert gradient is not None
            seen += [gradient.norm().detach(), torch.zeros_like(gradient), gradient > 0]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for constant in (gradient.detach(), gradient.data):
                (constant * first_weight(model)).sum().backward()
            gradient.detach_()
            (gradient * first_weight(model)).sum().backward()
            seen.append(gradient.detach().clone())
            model.zero_grad(set_to_none=number == 0)
            _penalty(model) if number else None
        return seen

    with infinity.offload(model, nvme, host_memory="1GiB", **given):
        seen = use(model)
        model.zero_grad()
    for ours, theirs in zip(seen, use(plain), strict=True):
        assert torch.allclose(ours, theirs) if tiled else same_bits(ours, theirs)


@pytest.mark.parametrize("tiled", [False, True])
def test_what_was_detached_has_a_history_of_its_own(tiled: bool, nvme: Path) -> None:
    model = seeded(make)
    given: dict[str, Any] = {"max_parameter_bytes": 1 << 18} if tiled else {}
    with infinity.offload(model, nvme, host_memory="1GiB", **given):
        vector_loss(model, 0).backward(create_graph=True)
        before = first_weight(model).grad
        assert before is not None
        detached = before.detach()
        first_weight(model).grad = detached
        assert not _penalty(model).requires_grad
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            before.sum().backward()
        before.data.add_(first_weight(model))
        assert not _penalty(model).requires_grad
        detached.add_(first_weight(model))
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            _penalty(model).backward()
        model.zero_grad()


@pytest.mark.parametrize("tiled", [False, True])
def test_a_view_of_a_gradient_with_a_history_is_for_reading(tiled: bool, nvme: Path) -> None:
    model = seeded(make)
    given: dict[str, Any] = {"max_parameter_bytes": 1 << 18} if tiled else {}
    with infinity.offload(model, nvme, host_memory="1GiB", **given):
        vector_loss(model, 0).backward(create_graph=True)
        gradient = first_weight(model).grad
        assert gradient is not None
        view, values = gradient.view(-1), gradient.detach().clone()
        assert same_bits(view.detach().clone(), values.view(-1))
        for change in (lambda: view.mul_(0.5), lambda: view.__setitem__(0, 1.0)):
            with pytest.raises(RuntimeError, match="changed a view of the gradient"):
                change()
        with torch.no_grad():
            gradient.mul_(0.5)
        with pytest.raises(RuntimeError, match="was taken before the gradient changed"):
            view.sum()
        model.zero_grad()


@pytest.mark.parametrize("tiled", [False, True])
def test_a_pass_that_makes_graphs_adds_up_in_another_tensor(tiled: bool, nvme: Path) -> None:
    """Who has the gradient from before keeps its values in memory, which are gone here."""
    model = seeded(make)
    given: dict[str, Any] = {"max_parameter_bytes": 1 << 18} if tiled else {}
    with infinity.offload(model, nvme, host_memory="1GiB", **given):
        vector_loss(model, 0).backward()
        before = first_weight(model).grad
        assert before is not None
        vector_loss(model, 1).backward()
        now = first_weight(model).grad
        assert now is not None
        assert same_bits(before, now)  # in the same one
        vector_loss(model, 2).backward(create_graph=True)
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight .*cleared or replaced"):
            before.norm()
        model.zero_grad()


class _Noted(torch.autograd.Function):
    """The identity, with something that lives as long as its node."""

    noted: ClassVar = weakref.WeakSet[nn.Module]()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.note = nn.Identity()
        _Noted.noted.add(ctx.note)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_no_graph_outlives_the_block(nvme: Path) -> None:
    model = seeded(make)
    with infinity.offload(model, nvme, host_memory="1GiB") as offloaded:
        x = torch.ones(8, WIDTH).requires_grad_()
        model(_Noted.apply(x)).square().mean().backward(create_graph=True)
        x.grad = None  # which would keep it
        gc.collect()
        assert _Noted.noted
    gc.collect()
    assert not _Noted.noted
    del offloaded


@pytest.mark.parametrize("create_graph", [False, True])
def test_functions_with_inplace_change_the_gradient(create_graph: bool, nvme: Path) -> None:
    model = seeded(make)
    plain = copy.deepcopy(model)

    def use(model: nn.Module) -> torch.Tensor:
        vector_loss(model, 0).backward(create_graph=create_graph)
        gradient = first_weight(model).grad
        assert gradient is not None
        nn.functional.relu(gradient, inplace=True)
        changed = gradient.detach().clone()
        model.zero_grad()
        return changed

    with infinity.offload(model, nvme, host_memory="1GiB"):
        ours = use(model)
    assert same_bits(ours, use(plain))


def test_a_gradient_in_tiles_is_refused_as_a_whole_one(nvme: Path) -> None:
    model = seeded(make)
    with infinity.offload(model, nvme, host_memory="1GiB", max_parameter_bytes=1 << 18):
        vector_loss(model, 0).backward(create_graph=True)
        gradient = first_weight(model).grad
        assert gradient is not None
        with pytest.raises(RuntimeError, match=REFUSED):
            (vector_loss(model, 1) + gradient.square().sum()).backward()
        model.zero_grad()


def test_once_cleared_a_gradient_has_no_history(nvme: Path) -> None:
    model = seeded(make)
    with infinity.offload(model, nvme, host_memory="1GiB") as offloaded:
        vector_loss(model, 0).backward(create_graph=True)
        assert _penalty(model).requires_grad
        offloaded.step()
        vector_loss(model, 0).backward()
        assert not _penalty(model).requires_grad
        model.zero_grad()


def test_an_operation_in_place_by_a_gradient_keeps_the_history_of_its_target(nvme: Path) -> None:
    """Not of the gradient alone, which has none."""
    model = seeded(make)
    plain = copy.deepcopy(model)

    def use(model: nn.Module) -> torch.Tensor:
        vector_loss(model, 0).backward()
        x = torch.ones_like(first_weight(model)).requires_grad_()
        y = x * 2
        gradient = first_weight(model).grad
        assert gradient is not None
        y.mul_(gradient)
        (found,) = torch.autograd.grad(y.sum(), [x])
        model.zero_grad()
        return found

    with infinity.offload(model, nvme, host_memory="1GiB"):
        ours = use(model)
    assert same_bits(ours, use(plain))
