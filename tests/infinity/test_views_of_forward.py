"""Views of weights that are taken within forward passes: right until the weights change, and
refused by name from then on, wherever the weights are.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import infinity
from infinity.autograd import kept_views
from tests.support.kept_views import REFUSED, Keeping, load, take_step
from tests.support.models import Stack, seeded, vector_loss
from tests.support.proof import by_turns, matrix
from tests.support.training import WHOLE, least_budget, same_bits

Change = Callable[[Any, Any, Path], None]


@torch.no_grad()
def _without_history(weight: Any) -> torch.Tensor:
    return weight.t()


def _shared(weight: Any) -> torch.Tensor:
    view: torch.Tensor = weight.detach().share_memory_()
    return view


TAKEN: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda weight: weight.t(),
    "row of a view": lambda weight: weight.view(2, -1)[0],
    "without history": _without_history,
    "detached": lambda weight: weight.detach()[0],
    "data": lambda weight: weight.data,
    "other dtype": lambda weight: weight.detach().view(torch.int32),
    "complex": lambda weight: torch.view_as_complex(weight.view(-1, 2)).conj(),
    "in an object": lambda weight: torch.nn.utils.rnn.PackedSequence(weight.t(), torch.ones(1)),
}


def _modify(offloaded: Any, model: Any, folder: Path) -> None:
    weight = model.layer(0).weight
    with offloaded.gathered([weight], modify=True), torch.no_grad():
        weight.mul_(2)


def _view(kept: Any) -> torch.Tensor:
    view: torch.Tensor = kept if isinstance(kept, torch.Tensor) else kept.data
    return view


def _bytes_of(budget: str, nvme: Path) -> int:
    """What is kept takes room of the weights."""
    return WHOLE if budget == "whole" else least_budget(Stack, nvme) + (1 << 20)


@pytest.fixture(params=["whole", "little"])
def budget(request: pytest.FixtureRequest, nvme: Path) -> int:
    return _bytes_of(request.param, nvme)


@pytest.mark.parametrize(
    ("name", "way"),
    by_turns(TAKEN, [*product(["whole", "little"], ["its layer", "another"])]),
    ids=str,
)
def test_view_is_right_until_a_step_and_refused_from_then_on(
    name: str, way: tuple[str, str], nvme: Path, tmp_path: Path
) -> None:
    budget, within = _bytes_of(way[0], nvme), way[1] == "its layer"
    model = seeded(lambda: Keeping(TAKEN[name], within=within))
    first = TAKEN[name](model.layer(0).weight)
    expected = _view(first).detach().clone()
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        for step in (2, 3):  # until then it is used as often as one likes
            vector_loss(model, step).backward()
            view = _view(model.kept[0])
            assert same_bits(view.detach().clone(), expected)
            if view.requires_grad:
                (view * 2).abs().sum().backward()
        take_step(offloaded, model, tmp_path)
        for use in (lambda: view * 2, lambda: view.detach().sum(), view.tolist, lambda: view[0]):
            with pytest.raises(RuntimeError, match=REFUSED):
                use()
        taken_anew = TAKEN[name](model.layer(0).weight)
        assert not torch.equal(_view(taken_anew).detach(), expected)


@pytest.mark.parametrize("change", [_modify, load])
def test_view_is_refused_after_other_changes(
    change: Change, budget: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(lambda: Keeping(TAKEN["transposed"], within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        vector_loss(model, 0).backward()
        change(offloaded, model, tmp_path)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()


@pytest.mark.parametrize("name", ["transposed", "detached"])
def test_view_is_refused_after_the_block(name: str, budget: int, nvme: Path) -> None:
    model = seeded(lambda: Keeping(TAKEN[name], within=True))
    with infinity.offload(model, nvme, host_memory=budget):
        vector_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        _ = model.kept[0] * 2


def test_view_of_a_weight_that_a_step_left_alone_stays(budget: int, nvme: Path) -> None:
    model = seeded(lambda: Keeping(TAKEN["transposed"], within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        vector_loss(model, 0)
        model.layer(1).weight.square().sum().backward()
        offloaded.step()
        model.kept[0].sum().backward()
        gradient = offloaded.gradient(model.layer(0).weight)
        assert gradient is not None
        assert gradient.eq(1).all()


def test_gradients_through_a_view_in_later_passes_are_those_of_memory(
    budget: int, nvme: Path
) -> None:
    """Over several passes before one step."""

    def gradient_of(model: Keeping, read: Callable[[Any], Any]) -> torch.Tensor:
        for step in range(3):
            loss = vector_loss(model, step)
            (loss + (model.kept[0] * (step + 1)).square().mean()).backward()
        gradient: torch.Tensor = read(model.layer(0).weight).clone()
        return gradient

    def make() -> Keeping:
        return seeded(lambda: Keeping(TAKEN["transposed"], within=True))

    expected = gradient_of(make(), lambda weight: weight.grad)
    model = make()
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        assert same_bits(gradient_of(model, offloaded.gradient), expected)


def test_weight_that_a_forward_pass_shares_with_other_processes_goes_on_training(
    budget: int, nvme: Path
) -> None:
    """What is shared is a copy from the next step on."""

    def train(model: Stack, step: Callable[[], object]) -> None:
        for number in range(3):
            vector_loss(model, number).backward()
            step()

    expected, model = seeded(Stack), seeded(lambda: Keeping(_shared, within=True))
    with infinity.offload(expected, nvme, host_memory=budget) as offloaded:
        train(expected, offloaded.step)
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        train(model, offloaded.step)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("change", matrix([take_step, load], usual=[take_step]))
def test_array_of_a_view_has_values_of_its_weight_alone(
    change: Change, budget: int, nvme: Path, tmp_path: Path
) -> None:
    """Those from before a change, or new ones; not what comes into that memory next."""
    model = seeded(lambda: Keeping(lambda weight: weight.detach().numpy(), within=True))
    values = [model.layer(0).weight.detach().clone()]

    def check() -> None:
        now = torch.from_numpy(model.kept[0].copy())
        assert any(same_bits(now, known) for known in values)

    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        for step in range(4):
            vector_loss(model, step)
            change(offloaded, model, tmp_path)
            offloaded.flush()
            values.append(model.layer(0).weight.detach().clone())
            check()
    check()


def test_tensor_that_is_no_view_any_more_stays_behind_a_load_that_failed(
    budget: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(lambda: Keeping(TAKEN["detached"], within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        vector_loss(model, 0)
        with pytest.raises(FileNotFoundError):
            offloaded.load(tmp_path / "nothing")
        model.kept[0].data = torch.ones(3)
        vector_loss(model, 1).backward()
        offloaded.step()
        assert model.kept[0].tolist() == [1.0] * 3


def _look(held: Any) -> Any:
    raise AssertionError("every tensor of the process is looked at")


def test_nothing_is_looked_for_where_nothing_is_kept(
    budget: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_views, "_views_over", _look)
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        loss = None
        for step in range(4):
            loss = vector_loss(model, step)  # the graph of the last one lives on
            loss.backward()
            offloaded.step()
        _modify(offloaded, model, tmp_path)
        load(offloaded, model, tmp_path)
        with torch.no_grad():
            model(torch.ones(2, 256))


def test_nothing_is_looked_for_where_what_is_kept_goes_in_a_moment(
    budget: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a thread has in its hands that has just read weights."""
    looks: list[object] = []

    def look(held: object) -> list[object]:
        looks.append(held)
        return []

    monkeypatch.setattr(kept_views, "_views_over", look)
    model = seeded(lambda: Keeping(TAKEN["transposed"], within=True))
    clock = SimpleNamespace(sleep=lambda seconds: model.kept.clear())
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        monkeypatch.setattr(kept_views, "time", clock)
        take_step(offloaded, model, tmp_path)
        assert not model.kept
        assert not looks


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated)")
def test_tensors_of_all_kinds_are_passed_by(nvme: Path) -> None:
    """What is no view of weights stays what it is, whatever kind of tensor it is."""
    with FakeTensorMode():
        fake = torch.ones(3)
    kinds: list[Any] = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3, device="meta"),
        torch._efficientzerotensor(3),
        nn.LazyLinear(4).weight,
        fake,
    ]
    before = [repr(kind) for kind in kinds]
    model = seeded(lambda: Keeping(TAKEN["transposed"], within=True))
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        take_step(offloaded, model, nvme)
        with pytest.raises(RuntimeError, match=REFUSED):
            model.kept[0].sum()
    assert [repr(kind) for kind in kinds] == before


def _interpose(patch: pytest.MonkeyPatch, between: Callable[[], object]) -> None:
    """``between`` runs, on another thread, as soon as a step knows what is kept by then."""
    find = kept_views.KeptViews.find

    def find_and_go_on(views: kept_views.KeptViews, indices: Any) -> None:
        find(views, indices)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(between).result()

    patch.setattr(kept_views.KeptViews, "find", find_and_go_on)


@pytest.mark.parametrize("name", matrix(["transposed", "detached"], usual=["transposed"]))
def test_view_that_another_thread_takes_as_a_step_begins_is_refused_behind_it(
    name: str, budget: int, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: Keeping(TAKEN[name], within=True))
    with infinity.offload(model, nvme, host_memory=budget) as offloaded:
        for step in range(2):
            with monkeypatch.context() as patch:
                model.kept.clear()
                _interpose(patch, lambda: vector_loss(model, 7))
                loss = vector_loss(model, step)
                model.kept.clear()
                loss.backward()
                offloaded.step()
            assert len(model.kept) == 1
            with pytest.raises(RuntimeError, match=REFUSED):
                model.kept[0].sum()
        vector_loss(model, 8).backward()
        offloaded.step()


def test_nothing_is_looked_for_where_another_thread_keeps_nothing(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where updates read old weights elsewhere they are in use meanwhile."""
    model = seeded(Stack)
    monkeypatch.setattr(kept_views, "_views_over", _look)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        _interpose(monkeypatch, lambda: vector_loss(model, 7))
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
