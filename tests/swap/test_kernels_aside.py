"""A step whose old values are elsewhere has the bits of one in place, and leaves those alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from infinity.optim.adamw import AdamRule
from infinity.optim.rule import OptimizerRule
from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin
from swap.kernels import BLOCK, adam_step_of
from swap.plan.layout import Component, Segment
from swap.plan.rules import ParameterUpdate
from swap.processors import available_isas, set_isa
from tests.support.tiers import OPTIONS, same_bits

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
ORIGIN = Origin(parameter=7, first=BLOCK)
LAYOUTS = {
    "halves": (torch.bfloat16, torch.int16),
    "copy-bf16": (torch.bfloat16, torch.float32),
    "copy-fp16": (torch.float16, torch.float32),
    "master": (torch.float32, None),
}
STATE = ("weight", "rest", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
MOMENTS = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.fixture(autouse=True)
def fastest_isa_again() -> Iterator[None]:
    yield
    set_isa(None)


def _random(n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """In memory that begins anywhere, as parts of arrays do."""
    values = torch.rand(n + 3, generator=generator) * 100
    return values.to(dtype)[3:]


def _state(layout: str, moments: torch.dtype, n: int, seed: int) -> AdamTensors:
    generator = torch.Generator().manual_seed(seed)
    weight, rest = LAYOUTS[layout]
    blocks = -(-n // MOMENT_BLOCK)
    in_blocks = moments == torch.uint8
    scales = [_random(blocks, torch.float32, generator) if in_blocks else None for _ in range(2)]
    return AdamTensors(
        weight=_random(n, weight, generator),
        rest=None if rest is None else _random(n, rest, generator),
        exp_avg=_random(n, moments, generator),
        exp_avg_sq=_random(n, moments, generator),
        grad=torch.randn(n, generator=generator),
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
    )


def _copied(tensors: AdamTensors, **changed: Any) -> AdamTensors:
    given = {name: getattr(tensors, name) for name in STATE}
    copies = {name: one.clone() for name, one in given.items() if one is not None}
    return replace(tensors, **copies | changed)


def _assert_same(one: AdamTensors, other: AdamTensors) -> None:
    for name in STATE:
        values, expected = getattr(one, name), getattr(other, name)
        assert (values is None) == (expected is None)
        assert values is None or same_bits(values, expected), name


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 257, 1024, 9 * BLOCK + 33])
def test_a_step_from_other_memory_has_the_same_bits(
    isa: str, layout: str, moments: torch.dtype, n: int
) -> None:
    set_isa(isa)
    _check(layout, moments, n, threads=1)


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_a_step_from_other_memory_in_several_threads_has_the_same_bits(
    moments: torch.dtype,
) -> None:
    _check("halves", moments, 67 * BLOCK + 300, threads=3)


def _check(layout: str, moments: torch.dtype, n: int, threads: int) -> None:
    old = _state(layout, moments, n, seed=1)
    aside = replace(_state(layout, moments, n, seed=2), grad=old.grad)
    in_place, before, gradient = _copied(old), _copied(old), old.grad.clone()
    adam_step_of(in_place, HYPER, origin=ORIGIN, threads=threads)
    adam_step_of(aside, HYPER, origin=ORIGIN, old=old, threads=threads)
    _assert_same(aside, in_place)
    _assert_same(old, before)
    assert same_bits(old.grad, gradient)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"exp_avg": torch.zeros(7)}, ValueError),
        ({"exp_avg": torch.zeros(8, dtype=torch.float64)}, TypeError),
        ({"rest": None}, TypeError),
        ({"exp_avg_scale": torch.zeros(1)}, TypeError),
    ],
)
def test_old_values_that_are_not_like_the_new_ones_are_refused(
    change: dict[str, Any], error: type[Exception]
) -> None:
    state = _state("halves", torch.float32, 8, seed=1)
    before = _copied(state)
    with pytest.raises(error, match=rf"{next(iter(change))} .*old"):
        adam_step_of(state, HYPER, origin=None, old=_copied(state, **change))
    _assert_same(state, before)


class _Counting(OptimizerRule):
    """A rule with no kernel of its own for this."""

    kept_by = "tests.Counting"

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        return (Component("count", torch.float32, zero=True),)

    def check(self, update: ParameterUpdate) -> None: ...

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        components["count"].add_(1)
        components["weight"].sub_(gradient * components["count"])


@pytest.mark.parametrize("rule", [_Counting(), AdamRule(threads=1)])
def test_rules_update_aside_as_in_place(rule: OptimizerRule) -> None:
    n = 1000
    components = [Component("weight", torch.bfloat16), *rule.components(torch.bfloat16)]
    old = {component.name: torch.rand(n).to(component.dtype) for component in components}
    in_place, before = ({name: one.clone() for name, one in old.items()} for _ in range(2))
    aside = {component.name: torch.ones(n, dtype=component.dtype) for component in components}
    segment = Segment(parameter=0, subgroup=0, start=0, length=n, offset=0)
    update = ParameterUpdate(parameter=0, step=2, shape=torch.Size([n]), options=OPTIONS)
    gradient = torch.randn(n).to(torch.bfloat16)
    rule.apply(segment, update, in_place, gradient, 0.5)
    rule.apply_aside(segment, update, old, aside, gradient, 0.5)
    assert all(same_bits(aside[name], values) for name, values in in_place.items())
    assert all(same_bits(old[name], values) for name, values in before.items())
