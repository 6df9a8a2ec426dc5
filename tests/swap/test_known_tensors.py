"""All tensors that there are, found without a trace."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from swap.memory.uses import known_tensors


class _Odd(type(torch.Tensor)):  # type: ignore[misc]
    """Of classes that answer for themselves, and not truly."""

    def __hash__(cls) -> int:
        raise AssertionError

    def __eq__(cls, other: object) -> bool:
        raise AssertionError

    def __instancecheck__(cls, instance: object) -> bool:
        raise AssertionError


class _Sub(torch.Tensor): ...


class _SubSub(_Sub, metaclass=_Odd): ...


def test_tensors_of_any_class_are_found_and_nothing_else() -> None:
    one = torch.zeros(3)
    made = [one, torch.nn.Parameter(one.clone()), one.as_subclass(_Sub), one.as_subclass(_SubSub)]
    gc.freeze()
    found = known_tensors()
    assert {id(each) for each in made} <= {id(each) for each in found}
    assert all(type.__subclasscheck__(torch.Tensor, type(each)) for each in found)
    assert len({id(each) for each in found}) == len(found)


def test_nothing_else_is_referred_to_any_longer_than_it_is_looked_at() -> None:
    others: list[list[int]] = [[] for _ in range(5)]
    before = [sys.getrefcount(each) for each in others]
    gc.disable()
    try:
        known_tensors()
        assert [sys.getrefcount(each) for each in others] == before
    finally:
        gc.enable()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_a_tuple_that_another_thread_is_making_is_left_alone() -> None:
    """CPython raises ``SystemError`` there where it finds a second reference to it."""
    is_over, failures = threading.Event(), list[BaseException]()

    def make_tuples() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(300))
            except SystemError as error:
                failures.append(error)

    maker = threading.Thread(target=make_tuples)
    maker.start()
    for _ in range(20):
        known_tensors()
    is_over.set()
    maker.join()
    assert failures == []
