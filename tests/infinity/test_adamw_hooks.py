"""Hooks of OffloadedAdamW that call it themselves, or have another thread do so."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import OffloadedAdamW
from tests.support.adamw_model import SMALL, make_model, same, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]
Optimizer = torch.optim.Optimizer
StateDict = dict[str, Any]


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[OffloadedAdamW]:
    model = make_model()
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=SMALL) as optimizer:
        train(model, optimizer, range(1))
        yield optimizer


def other_than(state_dict: StateDict) -> StateDict:
    other = copy.deepcopy(state_dict)
    for state in other["state"].values():
        state["step"] += 5
        state["exp_avg"].fill_(0.5)
    return other


def tensors_of(state_dict: StateDict) -> list[torch.Tensor]:
    return [value for state in state_dict["state"].values() for value in state.values()]


def _has_stepped_elsewhere(optimizer: Optimizer) -> bool:
    """Whether a step on another thread has ended while this one waited for it."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    thread = threading.Thread(target=optimizer.step, daemon=True)
    thread.start()
    thread.join(20.0)
    return not thread.is_alive()


def test_hook_behind_load_state_dict_finds_what_was_loaded(optimizer: OffloadedAdamW) -> None:
    other = other_than(optimizer.state_dict())
    found: list[StateDict] = []
    optimizer.register_load_state_dict_post_hook(lambda each: found.append(each.state_dict()))
    optimizer.load_state_dict(other)
    assert same(tensors_of(found[0]), tensors_of(other))


def test_hook_behind_load_state_dict_may_load_another(optimizer: OffloadedAdamW) -> None:
    first = optimizer.state_dict()

    def back(_: Optimizer) -> None:
        hook.remove()
        optimizer.load_state_dict(first)

    hook = optimizer.register_load_state_dict_post_hook(back)
    optimizer.load_state_dict(other_than(first))
    assert same(tensors_of(optimizer.state_dict()), tensors_of(first))


def test_hook_behind_load_state_dict_may_wait_for_a_thread_that_steps(
    optimizer: OffloadedAdamW,
) -> None:
    first = optimizer.state_dict()
    have_ended: list[bool] = []

    def beside(each: Optimizer) -> None:
        have_ended.append(_has_stepped_elsewhere(each))

    optimizer.register_load_state_dict_post_hook(beside)
    optimizer.load_state_dict(first)
    assert have_ended == [True]
    assert optimizer.report().steps == 2


def test_state_dict_is_loaded_whole_while_another_thread_is_in_the_hooks_of_its_own(
    optimizer: OffloadedAdamW,
) -> None:
    first = optimizer.state_dict()
    other = other_than(first)
    found: list[StateDict] = []

    def load_other() -> None:
        optimizer.load_state_dict(other)
        found.append(optimizer.state_dict())

    thread = threading.Thread(target=load_other)

    def beside(*_: Any) -> None:
        if threading.current_thread() is not thread:
            thread.start()
            thread.join()

    optimizer.register_load_state_dict_pre_hook(beside)
    optimizer.load_state_dict(first)
    assert same(tensors_of(found[0]), tensors_of(other))
    assert same(tensors_of(optimizer.state_dict()), tensors_of(first))


def test_state_dict_is_whole_where_a_hook_asks_for_another(optimizer: OffloadedAdamW) -> None:
    expected = optimizer.state_dict()
    found: list[StateDict] = []

    def within(each: Optimizer) -> None:
        hook.remove()
        found.append(each.state_dict())

    hook = optimizer.register_state_dict_pre_hook(within)
    found.append(optimizer.state_dict())
    assert all(same(tensors_of(each), tensors_of(expected)) for each in found)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hook_around_state_dict_may_wait_for_a_thread_that_steps(
    optimizer: OffloadedAdamW, when: str
) -> None:
    """As one that takes a lock does, which the program steps under."""
    have_ended: list[bool] = []

    def beside(each: Optimizer, *_: StateDict) -> None:
        have_ended.append(_has_stepped_elsewhere(each))

    before = optimizer.state_dict()
    hook = getattr(optimizer, f"register_state_dict_{when}_hook")(beside)
    found = optimizer.state_dict()
    hook.remove()
    assert have_ended == [True]
    expected = before if when == "post" else optimizer.state_dict()
    assert same(tensors_of(found), tensors_of(expected))


@pytest.mark.parametrize("when", ["state_dict_pre", "state_dict_post", "load_state_dict_pre"])
def test_hook_that_removes_itself_does_so(optimizer: OffloadedAdamW, when: str) -> None:
    calls: list[int] = []

    def once(*_: Any) -> None:
        hook.remove()
        calls.append(1)

    hook = getattr(optimizer, f"register_{when}_hook")(once)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [1]
