"""What hooks on modules call and refuse, over collaborators that only take note."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from infinity.autograd.module_hooks import ModelHooks
from infinity.autograd.phases import Passes
from infinity.parameters.records import records_of
from swap.interruptions.undo import Undo


class _Noted:
    """Stands for residency, phases, versions and saved tensors, and knows who computes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.depth = 0
        self.gathered: set[int] = set()
        self.copies: list[nn.Module] = []

    @property
    def is_computing(self) -> bool:
        return self.depth > 0

    def enter(
        self, module: nn.Module, own: list[int], frame: object, *, is_compiled: bool = False
    ) -> None:
        self.depth += 1
        self.calls.append(("all in" if is_compiled else "in", own))

    def leave(self, module: nn.Module) -> bool:
        self.depth -= 1
        self.calls.append("out")
        return self.depth > 0

    def is_gathered(self, indices: set[int]) -> bool:
        return indices <= self.gathered

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


class _Meter(nn.Module):
    """Another hash after each call, as metrics of torchmetrics have, which hash their state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __hash__(self) -> int:
        return hash((id(self), self.count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = _Meter()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.seen: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.seen += [x.dtype] if mask is None else [x.dtype, mask.dtype]
        if self.fails:
            raise ValueError("of the model")
        result: torch.Tensor = self.second(self.first(x.float()))
        return result


Hooked = tuple[_Model, _Noted, list[str]]


def _hooks_of(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
    more = ("_load_state_dict_pre_hooks", "_forward_pre_hooks_with_kwargs")
    last = ("_forward_hooks_always_called",)
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in (*names, *more, *last)
    )


@pytest.fixture
def hooked() -> Iterator[Hooked]:
    """A model with the hooks, what they call, and the ends of passes of inference."""
    model, noted, ends = _Model(), _Noted(), list[str]()
    before = _hooks_of(model)
    each: Any = noted
    with Undo() as undo:
        hooks = ModelHooks(
            model,
            records_of(model, None),
            *(each, each, each, each),
            compute_dtype=torch.bfloat16,
            passes=Passes(lambda: ends.append("end")),
        )
        hooks.attach(undo)
        yield model, noted, ends
    assert _hooks_of(model) == before
    for module in (model, *noted.copies):
        assert not vars(module).keys() & {"_apply", "__prepare_scriptable__"}
    assert not sum(map(_hooks_of, noted.copies))


def test_weights_are_in_from_before_each_forward_to_after_it(hooked: Hooked) -> None:
    model, noted, _ = hooked
    model(torch.ones(1, 4))
    assert noted.calls == [
        *("join_thread", "check_values", "forward_begins", ("in", [])),
        *(("in", [0, 1]), "out", ("in", [2]), "out"),
        *("out", "forward_ends", "leave_thread"),
    ]


def test_a_forward_that_raises_is_left_all_the_same(hooked: Hooked) -> None:
    model, noted, _ = hooked
    model.fails = True
    with pytest.raises(ValueError, match="of the model"):
        model(torch.ones(1, 4))
    assert noted.depth == 0
    assert noted.calls[-3:] == ["out", "forward_ends", "leave_thread"]


def test_a_part_that_is_called_by_itself_is_no_forward_of_the_model(hooked: Hooked) -> None:
    model, noted, ends = hooked
    model.first(torch.ones(1, 4))
    assert noted.calls == ["join_thread", ("in", [0, 1]), "out", "leave_thread"]
    assert ends == []
    model.first(torch.ones(1, 4))
    assert ends == ["end"], "what began the last pass begins again"


def test_floating_point_inputs_of_the_model_take_the_compute_dtype(hooked: Hooked) -> None:
    model, _, _ = hooked
    model(torch.ones(1, 4), mask=torch.ones(1))
    model(torch.ones(1, 4), mask=torch.ones(1, dtype=torch.bool))
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bool]


def test_the_cache_of_autocast_is_off_within_and_as_it_was_after(hooked: Hooked) -> None:
    model, _, _ = hooked
    torch.set_autocast_cache_enabled(True)  # wherever the tests before have left it
    within: list[bool] = []
    handle = model.second.register_forward_hook(
        lambda *_: within.append(torch.is_autocast_cache_enabled())
    )
    model(torch.ones(1, 4))
    handle.remove()
    assert within == [False]
    assert torch.is_autocast_cache_enabled()


def test_state_dicts_are_refused_unless_all_of_them_is_gathered(hooked: Hooked) -> None:
    model, noted, _ = hooked
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for gathered in (set[int](), {0, 1}):
        noted.gathered = gathered
        with pytest.raises(RuntimeError, match="would hold placeholders"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="cannot reach the values"):
            model.load_state_dict(values)
    assert set(model.first.state_dict()) == {"weight", "bias"}
    noted.gathered = {0, 1, 2}
    assert set(model.state_dict()) == set(values)
    model.load_state_dict(values)
    assert not model.second.weight.any()


def test_conversions_are_refused_but_those_that_change_nothing(hooked: Hooked) -> None:
    model, _, _ = hooked
    assert model.float() is model
    assert model.to("cpu") is model
    for convert in (model.half, model.first.double, model.share_memory):
        with pytest.raises(RuntimeError, match=r"stays torch\.float32 on cpu"):
            convert()


def test_a_copy_of_a_module_is_refused_when_it_is_made_or_called(hooked: Hooked) -> None:
    model, _, _ = hooked
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(model)
    replica = model.first._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="a copy of an offloaded Linear was called"):
        replica(torch.ones(1, 4))


def test_a_module_whose_hash_changes_as_it_is_called_is_the_same_one(hooked: Hooked) -> None:
    model, noted, ends = hooked
    for _ in range(3):
        model.meter(torch.ones(1, 4))
    assert noted.calls.count(("in", [])) == 3
    assert len(ends) == 2


def test_a_copy_of_a_module_without_parameters_works_and_keeps_no_hooks(hooked: Hooked) -> None:
    model, noted, _ = hooked
    meters = [copy.deepcopy(model.meter), copy.deepcopy(nn.ModuleList([model.meter]))[0]]
    meters.append(copy.deepcopy(meters[0]))
    for meter in meters:
        assert meter(torch.ones(1, 4)).shape == (1, 4)
        assert meter.float() is meter
    assert noted.calls.count(("in", [])) == len(meters)
    noted.copies += meters
