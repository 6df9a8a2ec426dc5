"""Which parameters have their weights in place, with weights that come at once."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Set

import pytest
import torch
from torch import nn

from infinity.autograd.residency import ModuleResidency
from infinity.parameters.offloaded.becoming import become_offloaded
from infinity.parameters.offloaded.parameter import AbsentParameter
from infinity.parameters.records import records_of
from swap.cache.owners import Held


class _Weights:
    """Weights of ones; says who holds what."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self.acquired: dict[Hashable, tuple[int, ...]] = {}
        self.fails = False

    def acquire(self, parameters: Iterable[int], holder: Hashable) -> list[torch.Tensor]:
        if self.fails:
            raise OSError("cannot be read")
        self.acquired[holder] = tuple(parameters)
        return [torch.ones(self._sizes[index]) for index in self.acquired[holder]]

    def release(self, holder: Hashable) -> None:
        self.acquired.pop(holder, None)

    def borrow(self, parameter: int) -> torch.Tensor:
        return torch.ones(self._sizes[parameter])

    def owner(self, storage: int) -> None:
        return None

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        return []

    def renew(self, parameter: int, weight: torch.Tensor) -> None:
        return None

    def at_home(self, parameter: int) -> None:
        return None

    def drop(self) -> None:
        return None


class _Owner:
    """Of parameters that no operation is made on."""

    def name_of(self, index: int) -> str:
        return f"parameter {index}"


@pytest.fixture
def placed() -> tuple[nn.Module, ModuleResidency, _Weights]:
    """Two layers, with room for one weight that is reached from outside of its module."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    records = records_of(model, None)
    weights = _Weights([record.numel for record in records])
    residency = ModuleResidency(records, weights, torch.device("cpu"), outside_bytes=64)
    for record in records:
        owner: object = _Owner()
        become_offloaded(
            record.parameter,
            record.index,
            owner,  # type: ignore[arg-type]
            torch.float32,
            torch.device("cpu"),
        )
    residency.attach(model)
    return model, residency, weights


def _absent(model: nn.Module) -> list[bool]:
    return [isinstance(p, AbsentParameter) for p in model.parameters()]


def test_own_parameters_are_in_place_from_enter_to_leave(
    placed: tuple[nn.Module, ModuleResidency, _Weights],
) -> None:
    model, residency, weights = placed
    assert _absent(model) == [True, True]
    residency.enter(model, [0], sys._getframe())
    assert residency.held == [0]
    assert residency.is_computing
    assert not residency.leave(model)
    assert (residency.held, weights.acquired) == ([], {})
    assert _absent(model) == [True, True]


def test_a_parameter_held_twice_stays_until_the_last_leaves(
    placed: tuple[nn.Module, ModuleResidency, _Weights],
) -> None:
    model, residency, _ = placed
    inner = next(model.children())
    residency.enter(model, [0], sys._getframe())
    residency.enter(inner, [0], sys._getframe())
    assert residency.leave(inner)
    assert residency.held == [0]
    assert not residency.leave(model)
    assert residency.held == []


def test_parameters_accessed_outside_make_room_for_one_another_and_go_with_the_frame(
    placed: tuple[nn.Module, ModuleResidency, _Weights],
) -> None:
    model, residency, weights = placed
    residency.visit(0)
    assert residency.held == []  # no forward runs
    residency.enter(model, [], sys._getframe())
    residency.visit(0)
    residency.visit(1)
    assert residency.held == [1]
    residency.leave(model)
    assert (residency.held, weights.acquired) == ([], {})


def test_weights_that_cannot_be_read_leave_nothing_held(
    placed: tuple[nn.Module, ModuleResidency, _Weights],
) -> None:
    model, residency, weights = placed
    weights.fails = True
    with pytest.raises(OSError, match="cannot be read"):
        residency.enter(model, [0], sys._getframe())
    residency.leave(model)
    assert (residency.held, weights.acquired) == ([], {})
    assert _absent(model) == [True, True]


def test_a_frame_that_ended_without_leaving_is_noticed(
    placed: tuple[nn.Module, ModuleResidency, _Weights],
) -> None:
    model, residency, _ = placed

    def interrupted() -> None:
        residency.enter(model, [0, 1], sys._getframe())

    interrupted()
    assert residency.held == [0, 1]
    assert not residency.is_computing
    assert residency.held == []
