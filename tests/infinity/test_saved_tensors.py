"""Saved tensors that are weights are remembered by name, over weights that come at once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Set

import pytest
import torch
from torch import nn

from infinity.activations.offloading import Activations
from infinity.autograd.phases import Phases
from infinity.autograd.saved_tensors import SavedTensors
from infinity.parameters.homes import Homes
from infinity.parameters.records import Record, records_of
from swap.cache.owners import Held
from swap.timeline import Timeline

WIDTH = 130
"""Squared it is more than what always stays in memory."""


class _Weights:
    """Copies of parameters, one after the other in one storage if ``at_home``."""

    def __init__(self, records: list[Record], *, is_home: bool) -> None:
        self._values = [record.parameter.detach().clone().view(-1) for record in records]
        self.memory = torch.cat(self._values)
        self._is_home = is_home
        self.borrowed: list[int] = []
        self.owners: dict[int, int] = {}
        """Parameters by ``_cdata`` of the storages that the arena has their weights in."""

    def place(self, index: int) -> torch.Tensor:
        """Where the weights of a parameter are computed with, in memory of their own."""
        return self._values[index].clone()

    def acquire(self, parameters: Iterable[int], holder: Hashable) -> list[torch.Tensor]:
        raise NotImplementedError

    def release(self, holder: Hashable) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        raise NotImplementedError

    def borrow(self, parameter: int) -> torch.Tensor:
        self.borrowed.append(parameter)
        return self.place(parameter)

    def owner(self, storage: int) -> int | None:
        return self.owners.get(storage)

    def held(self, parameters: Set[int], *, outdated: bool = False) -> list[Held]:
        raise NotImplementedError

    def renew(self, parameter: int, weight: torch.Tensor) -> None:
        return None

    def at_home(self, parameter: int) -> torch.Tensor | None:
        numel = WIDTH * WIDTH
        return self.memory[parameter * numel :][:numel] if self._is_home else None


class _Rig:
    def __init__(self, *, is_home: bool = False) -> None:
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        )
        self.records = records_of(model, None)
        self.weights = _Weights(self.records, is_home=is_home)
        self.held: list[int] = []
        self.at_home = Homes(self.records, self.weights)
        phases = Phases(Timeline(), torch.device("cpu"))
        self.saved = SavedTensors(self.records, self.weights, phases, Activations(), self)
        self.x = torch.randn(2, WIDTH, requires_grad=True)

    def innermost(self) -> int:
        """No forward runs."""
        return -1

    def weight(self, index: int) -> torch.Tensor:
        """Weights that the arena has."""
        flat = self.weights.place(index)
        self.weights.owners[flat.untyped_storage()._cdata] = index
        return flat.view(WIDTH, WIDTH)

    def expected(self, index: int) -> torch.Tensor:
        """The gradient of ``x`` in the sum of ``x`` times a weight."""
        return self.records[index].parameter.detach().sum(1).expand(2, -1)


@pytest.fixture
def rig() -> Iterator[_Rig]:
    made = _Rig()
    with made.saved:
        yield made
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_graph_holds_no_weights_and_its_backward_fetches_them(rig: _Rig) -> None:
    weight = rig.weight(1)
    loss = (rig.x @ weight).sum()
    weight.zero_()  # as memory that others get
    loss.backward()
    assert rig.weights.borrowed == [1]
    torch.testing.assert_close(rig.x.grad, rig.expected(1))


def test_a_view_of_weights_comes_back_as_that_view(rig: _Rig) -> None:
    transposed = rig.weight(0).t()
    packed = rig.saved.find(transposed)
    assert packed is not None
    again = rig.saved.fetch(packed)
    assert again.stride() == transposed.stride()
    assert torch.equal(again, transposed)
    assert rig.saved.find(torch.ones(3)) is None


def test_backward_after_a_step_is_refused_by_name(rig: _Rig) -> None:
    loss = (rig.x @ rig.weight(1)).sum()
    rig.saved.generations[1] += 1
    with pytest.raises(RuntimeError, match=re.escape("1.weight was updated by an optimizer step")):
        loss.backward()
    assert rig.weights.borrowed == []


def test_backward_after_a_change_in_place_is_refused_by_name(rig: _Rig) -> None:
    loss = (rig.x @ rig.weight(0)).sum()
    with torch.no_grad():
        rig.records[0].parameter.add_(1)
    with pytest.raises(RuntimeError, match=re.escape("0.weight, which is needed")):
        loss.backward()


def test_other_tensors_that_were_changed_in_place_are_refused(rig: _Rig) -> None:
    other = torch.ones(2, WIDTH)
    loss = (rig.x * other).sum()
    other.add_(1)
    with pytest.raises(RuntimeError, match="was modified in place"):
        loss.backward()


def test_backward_after_the_block_is_refused_by_name() -> None:
    rig = _Rig()
    with rig.saved:
        loss = (rig.x @ rig.weight(0)).sum()
    rig.saved.__exit__()  # once more, as after an interrupt
    with pytest.raises(RuntimeError, match=re.escape("needs 0.weight, which is not offloaded")):
        loss.backward()


def test_a_cast_of_weights_that_are_in_place_is_made_again(rig: _Rig) -> None:
    cast = rig.records[0].parameter.detach().to(torch.bfloat16)
    assert rig.saved.find(cast) is None, "no module computes with it"
    rig.held = [0]
    packed = rig.saved.find(cast)
    assert packed is not None
    assert packed.cast == torch.bfloat16
    assert torch.equal(rig.saved.fetch(packed), cast)
    assert rig.saved.find(torch.zeros_like(cast)) is None


def test_weights_at_home_are_told_apart_by_where_they_lie() -> None:
    rig = _Rig(is_home=True)
    numel = WIDTH * WIDTH
    found = [rig.saved.find(rig.weights.memory[at : at + 8]) for at in (0, numel, numel - 4)]
    assert [None if packed is None else packed.index for packed in found] == [0, 1, None]


def test_a_leaf_of_a_program_over_weights_gets_memory_of_its_own(rig: _Rig) -> None:
    weight = rig.weight(0)
    leaf = nn.Parameter(weight.t())
    (rig.x @ leaf).sum().backward()
    assert leaf.untyped_storage()._cdata != weight.untyped_storage()._cdata
    assert torch.equal(leaf, weight.t())
