"""Several threads that gather at once, some of them in the midst of a forward pass."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.autograd.modifying import Loans
from infinity.autograd.residency import ModuleResidency
from infinity.parameters.records import Record
from infinity.ranks.context import SingleRank
from tests.support.adamw_model import batch, make_model
from tests.support.training import least_budget


def _weight(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("2.weight")  # which is on NVMe


def test_who_shares_what_is_lent_waits_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changed what was not lent yet, and the change was lost without a word."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    expected = _weight(model).detach() + 1
    weight_of, is_amid, may_go_on = SingleRank.weight_of, threading.Event(), threading.Event()

    def late(self: SingleRank, record: Record) -> torch.Tensor:
        is_amid.set()
        may_go_on.wait(10)
        return weight_of(self, record)

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(1) as other,
    ):
        monkeypatch.setattr(SingleRank, "weight_of", late)
        first = offloaded.gathered()
        lending = other.submit(first.__enter__)
        is_amid.wait()
        threading.Timer(0.3, may_go_on.set).start()
        with offloaded.gathered(_weight(model), modify=True), torch.no_grad():
            _weight(model).add_(1)
            lending.result()
        first.__exit__(None, None, None)
    assert torch.equal(_weight(model).detach(), expected)


def test_who_gathers_within_a_pass_shares_with_who_waits_for_it(tmp_path: Path) -> None:
    model, least = make_model(), least_budget(make_model, tmp_path)
    expected = _weight(model).detach() + 1
    is_inside = threading.Event()

    def change(*_: Any) -> None:
        is_inside.set()
        while not offloaded._training.loans._waiting:  # for this very pass
            time.sleep(0.001)
        with offloaded.gathered(_weight(model), modify=True), torch.no_grad():
            _weight(model).add_(1)

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(1) as other,
    ):
        hook = next(iter(model.children())).register_forward_hook(change)
        computing = other.submit(torch.no_grad()(model), batch(0))
        is_inside.wait()
        with offloaded.gathered():
            computing.result()
        hook.remove()
    assert torch.equal(_weight(model).detach(), expected)


def test_passes_that_gather_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for as long as it may for the other, which waited for it."""
    monkeypatch.setattr("infinity.autograd.modifying._PATIENCE_SECONDS", 30.0)
    model, least = make_model(), least_budget(make_model, tmp_path)
    expected = [model(batch(step)).detach() for step in range(2)]
    both = threading.Barrier(2)

    def look(module: nn.Module, *_: Any) -> None:
        both.wait(10)
        with offloaded.gathered(module):
            assert all(parameter.isfinite().all() for parameter in module.parameters())

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(2) as others,
    ):
        hook = next(iter(model.children())).register_forward_hook(look)
        computing = [others.submit(torch.no_grad()(model), batch(step)) for step in range(2)]
        results = [one.result(20) for one in computing]
        hook.remove()
    assert all(map(torch.equal, results, expected))


def _add_one(offloaded: infinity.OffloadedModel, weight: nn.Parameter, has_begun: Any) -> None:
    with offloaded.gathered(weight, modify=True), torch.no_grad():
        has_begun()
        weight.add_(1)


def test_of_two_that_end_at_once_one_keeps_what_both_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the other for one who was to keep it, and all was lost without a word."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    expected = _weight(model).detach() + 1 + 1
    keep, in_turn, both = Loans._keep, threading.Barrier(2), threading.Barrier(2)
    lock = threading.Lock()

    def keep_at_once(*arguments: Any) -> None:
        both.wait(10)
        keep(*arguments)

    def change() -> None:
        with offloaded.gathered(_weight(model), modify=True), torch.no_grad():
            in_turn.wait(10)
            with lock:
                _weight(model).add_(1)

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(2) as others,
    ):
        monkeypatch.setattr(Loans, "_keep", keep_at_once)
        for changing in [others.submit(change) for _ in range(2)]:
            changing.result()
        monkeypatch.undo()
    assert torch.equal(_weight(model).detach(), expected)


def test_who_asks_for_what_is_given_back_just_now_is_lent_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shared what was no longer lent, and was refused as if it had changed that outside."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    expected = _weight(model).detach() + 1 + 1
    let_in, is_amid = ModuleResidency.let_in, threading.Event()
    has_begun, is_in = threading.Event(), threading.Event()

    def let_in_late(residency: ModuleResidency, indices: Iterable[int]) -> None:
        if indices:
            is_amid.set()
            has_begun.wait(0.5)  # not, where that waits for this
            let_in(residency, indices)
            is_in.set()

    def begun() -> None:
        has_begun.set()
        is_in.wait()

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(1) as other,
    ):
        monkeypatch.setattr(ModuleResidency, "let_in", let_in_late)
        first = other.submit(_add_one, offloaded, _weight(model), lambda: None)
        is_amid.wait()
        _add_one(offloaded, _weight(model), begun)
        first.result()
        monkeypatch.undo()
    assert torch.equal(_weight(model).detach(), expected)


@pytest.mark.parametrize("fails_in", ["the other thread", "the block around it"])
def test_what_a_thread_has_changed_does_not_depend_on_the_end_of_another(
    tmp_path: Path, fails_in: str
) -> None:
    """Its block had ended without an error, and an error of the other lost all without a word."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    before = _weight(model).detach()
    is_kept = fails_in == "the other thread"

    def fail_around(change: Callable[[], None]) -> None:
        with offloaded.gathered(_weight(model), modify=True):
            change()
            raise ValueError("in its midst")

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(1) as other,
    ):

        def change() -> None:
            _add_one(offloaded, _weight(model), lambda: None)

        with pytest.raises(ValueError, match="in its midst"):
            fail_around((lambda: other.submit(change).result()) if is_kept else change)
        assert torch.equal(_weight(model).detach(), before + is_kept)
    assert torch.equal(_weight(model).detach(), before + is_kept)
