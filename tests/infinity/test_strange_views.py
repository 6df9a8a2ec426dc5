"""Views of weights that forward passes leave behind, of kinds and at moments that are rare: each is
refused by name, or a warning, and none stops a step or changes another number.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.kept_views import REFUSED, Keeping, load, take_step
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits


def _transposed(weight: Any) -> torch.Tensor:
    view: torch.Tensor = weight.t()
    return view


@pytest.fixture(params=["whole", "little"])
def budget(request: pytest.FixtureRequest, nvme: Path) -> int:
    """Bytes; what is kept takes room of the weights."""
    return WHOLE if request.param == "whole" else least_budget(Stack, nvme) + (1 << 20)


def _of_its_own(weight: Any) -> torch.Tensor:
    view: torch.Tensor = weight.detach().as_subclass(_OwnData)
    return view


class _OwnData(torch.Tensor):
    """Answers for itself."""

    layout = device = shape = "not what torch has"  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("asked for")

    def untyped_storage(self) -> Any:
        raise AssertionError("asked for")


def _within(transform: Callable[[Any, Any], object]) -> Callable[[Any], torch.Tensor]:
    def leak(weight: Any) -> torch.Tensor:
        leaked: list[torch.Tensor] = []

        def function(values: torch.Tensor) -> torch.Tensor:
            leaked.append(values)
            return values * 2

        transform(function, weight.detach())
        return leaked[0]

    return leak


STRANGE: dict[str, Callable[[Any], Any]] = {
    "of a class": _of_its_own,
    "of jvp": _within(lambda f, values: torch.func.jvp(f, (values,), (values.clone(),))),
    "of functionalize": _within(lambda f, values: torch.func.functionalize(f)(values)),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", STRANGE)
def test_view_of_a_strange_kind_is_refused_and_stops_no_step(
    name: str, budget: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(lambda: Keeping(STRANGE[name], within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        for _ in range(2):
            take_step(offloaded, model, tmp_path)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()


def _nested(weight: Any) -> torch.Tensor:
    """Its class in C++ has no shape that could be asked for."""
    sizes, strides = torch.tensor([[2, 3]]), torch.tensor([[3, 1]])
    flat = weight.detach().view(-1)
    view: torch.Tensor = torch._nested_view_from_buffer(flat, sizes, strides, torch.tensor([0]))
    return view


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_view_that_cannot_be_refused_is_a_warning_and_stops_no_step(
    budget: int, nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(lambda: Keeping(_nested, within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        for _ in range(2):
            take_step(offloaded, model, tmp_path)
        model.kept.clear()
    assert "a view of layers.0.weight" in caplog.text
    assert "cannot be refused" in caplog.text


def test_view_that_the_program_froze_is_refused(budget: int, nvme: Path, tmp_path: Path) -> None:
    model = seeded(lambda: Keeping(_transposed, within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        vector_loss(model, 0)
        gc.freeze()
        try:
            take_step(offloaded, model, tmp_path)
        finally:
            gc.unfreeze()
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()


def test_parameter_without_elements_lies_in_the_memory_of_no_other(
    budget: int, nvme: Path, tmp_path: Path
) -> None:
    class WithEmpty(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x), self.empty])

    def train(make: Callable[[], Any]) -> dict[str, torch.Tensor]:
        model = seeded(make)
        with infinity.offload(model, nvme, host_memory=budget) as offloaded:
            for change in (take_step, take_step, load, take_step):
                x = torch.ones(2, 256, requires_grad=True)
                loss = model(x).square().sum()
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                slope.square().sum().backward()
                change(offloaded, model, tmp_path)
        return dict(model.named_parameters())

    expected, found = train(Stack), train(WithEmpty)
    assert found["empty"].shape == (0, 256)
    assert all(same_bits(found[name], value) for name, value in expected.items())


def test_view_is_refused_after_a_restore(budget: int, nvme: Path) -> None:
    model = seeded(lambda: Keeping(_transposed, within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        offloaded.snapshot("first")
        vector_loss(model, 0)
        offloaded.restore("first")
        offloaded.drop_snapshot("first")
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()


def test_view_is_refused_after_a_step_that_comes_after_a_change_of_another(
    budget: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(lambda: Keeping(_transposed, within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        vector_loss(model, 0)
        other = model.layer(1).weight
        with offloaded.gathered([other], modify=True), torch.no_grad():
            other.mul_(2)
        assert same_bits(model.kept[0].detach(), model.layer(0).weight.detach().t())
        take_step(offloaded, model, tmp_path)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()


@pytest.mark.parametrize("within", [True, False], ids=["in a forward", "outside"])
def test_many_views_of_one_weight_are_refused_one_by_one(
    within: bool, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is that for so many, not for the square of it."""
    asked: list[object] = []

    class Ref(weakref.ref[Any]):
        def __call__(self) -> Any:
            asked.append(self)
            return super().__call__()

    monkeypatch.setattr(weakref, "ref", Ref)
    model = seeded(lambda: Keeping(lambda weight: weight.unbind() if within else None, within=True))
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        outside = () if within else model.layer(0).weight.unbind()
        take_step(offloaded, model, tmp_path)
        with pytest.raises(RuntimeError, match=REFUSED):
            (outside or model.kept[0])[100].sum()
    assert 0 < len([ref for ref in asked if isinstance(ref, Ref)]) < 5 * 256


class Slow(Stack):
    """On threads it has a view of a weight in its hands for as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.has_one, self.goes_on = threading.Event(), threading.Event()
        self.kept: torch.Tensor | None = None
        self.sum_in_forward: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.kept = self.layer(0).weight.t()
            self.has_one.set()
            assert self.goes_on.wait(60)
            self.sum_in_forward = self.kept.sum()
        return super().forward(x)


def test_forward_on_another_thread_goes_on_with_its_views_and_leaves_none(
    budget: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Slow)

    @torch.no_grad()
    def evaluate() -> None:
        model(torch.ones(2, 256))

    thread = threading.Thread(target=evaluate)
    with infinity.offload(model, nvme, host_memory=budget + (1 << 20)) as offloaded:
        vector_loss(model, 0).backward()
        thread.start()
        assert model.has_one.wait(60)
        offloaded.step()
        model.goes_on.set()
        thread.join()
        assert model.sum_in_forward is not None
        assert model.kept is not None
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept.sum()


def test_buffer_that_became_such_a_view_keeps_no_other_from_coming_back(nvme: Path) -> None:
    class Counting(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.view: torch.Tensor
            self.count: torch.Tensor
            self.register_buffer("view", torch.zeros(256, 256))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.view = self.layer(0).weight.detach()
            self.count += 1
            return super().forward(x)

    model: Any = seeded(Counting)
    options: dict[str, Any] = {"host_memory": WHOLE, "compute_dtype": torch.bfloat16}
    block = infinity.offload(model, nvme, **options)
    offloaded = block.__enter__()
    take_step(offloaded, model, nvme)
    with pytest.raises(RuntimeError, match=REFUSED):
        block.__exit__(None, None, None)
    assert same_bits(model.count, torch.ones(3))
    assert model.layer(0).weight.dtype == torch.float32
