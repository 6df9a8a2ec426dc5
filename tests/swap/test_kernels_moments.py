"""Moments in 16 and 8 bits: the kernel against plain numpy, and against itself cut in pieces."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from swap.adam import MOMENT_BLOCK, AdamHyper, Origin
from swap.kernels import adam_step
from swap.processors import available_isas, set_isa
from tests.support.moments import (
    adam_in_numpy,
    decode_blocks,
    encode_blocks,
    random_words,
    round_to_bf16,
    split_master,
    values_of_codes,
)

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
ORIGIN = Origin(parameter=7, first=3 * 4096)
LAYOUTS = {
    "halves": (torch.bfloat16, torch.int16),
    "copy-bf16": (torch.bfloat16, torch.float32),
    "copy-fp16": (torch.float16, torch.float32),
    "master": (torch.float32, None),
}
DTYPES = [torch.bfloat16, torch.uint8]
_MOMENTS = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fastest_isa_again() -> Iterator[None]:
    yield
    set_isa(None)


def _state(
    layout: str, dtype: torch.dtype, n: int, *, grad: torch.dtype = torch.float32
) -> Tensors:
    generator = torch.Generator().manual_seed(n)
    weight, rest = LAYOUTS[layout]
    state = {
        "weight": torch.randn(n, generator=generator).to(weight),
        # Sizes as they are in training: over many powers of two within a block.
        "grad": (torch.randn(n, generator=generator) * torch.rand(n, generator=generator) ** 9).to(
            grad
        ),
    }
    if rest is not None:
        state["rest"] = (torch.randn(n, generator=generator) * 100).to(rest)
    if dtype == torch.uint8:
        for name in _MOMENTS:
            state[name] = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
            blocks = -(-n // MOMENT_BLOCK)
            state[f"{name}_scale"] = torch.rand(blocks, generator=generator)
    else:
        state["exp_avg"] = torch.randn(n, generator=generator).to(dtype)
        state["exp_avg_sq"] = torch.rand(n, generator=generator).to(dtype)
    return state


def _stepped(
    state: Tensors, hyper: AdamHyper = HYPER, origin: Origin = ORIGIN, threads: int = 1
) -> Tensors:
    after: dict[str, Any] = {name: tensor.clone() for name, tensor in state.items()}
    after.setdefault("rest", None)
    adam_step(**after, hyper=hyper, origin=origin, threads=threads)
    del after["grad"]
    return {name: tensor for name, tensor in after.items() if tensor is not None}


def _assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def _decoded(state: Tensors, name: str) -> torch.Tensor:
    if state[name].dtype != torch.uint8:
        return state[name].float()
    return decode_blocks(state[name], state[f"{name}_scale"], is_signed=name == "exp_avg")


def _encoded(floats: Tensors, dtype: torch.dtype, hyper: AdamHyper, origin: Origin) -> Tensors:
    """The moments of ``floats`` in ``dtype``, by the reference."""
    n = floats["exp_avg"].numel()
    words = random_words(origin.parameter, hyper.step, origin.first, n)
    halves = {"exp_avg": words & np.uint32(0xFFFF), "exp_avg_sq": words >> np.uint32(16)}
    found: Tensors = {}
    for name, random16 in halves.items():
        if dtype == torch.bfloat16:
            found[name] = round_to_bf16(floats[name], random16)
        else:
            found[name], found[f"{name}_scale"] = encode_blocks(
                floats[name], random16, is_signed=name == "exp_avg"
            )
    return found


def _expected(state: Tensors, hyper: AdamHyper, origin: Origin) -> Tensors:
    """Decoded, stepped and encoded by the reference."""
    floats = state | {name: _decoded(state, name) for name in _MOMENTS}
    master, exp_avg, exp_avg_sq = adam_in_numpy(floats, hyper)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    weights = split_master(master, state)
    return weights | _encoded(moments, state["exp_avg"].dtype, hyper, origin)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 31, 255, 256, 257, 20_011])
def test_step_equals_the_reference_on_every_isa(
    name: str, layout: str, dtype: torch.dtype, n: int
) -> None:
    set_isa(name)
    state = _state(layout, dtype, n, grad=torch.bfloat16)
    other = replace(HYPER, step=4, beta1=0.3, grad_scale=0.3, decoupled=False)
    for hyper in (HYPER, other, replace(other, weight_decay=0.0)):
        _assert_same_bits(_stepped(state, hyper), _expected(state, hyper, ORIGIN))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"},
    reason="needs torch with AVX2 or AVX-512 kernels",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_equals_plain_torch_and_numpy(dtype: torch.dtype) -> None:
    """Nothing of ours in the reference: torch's fused AdamW between decoding and encoding."""
    n = 1 << 14
    ours = _state("master", dtype, n)
    theirs = ours
    for step in range(1, 9):
        hyper = replace(HYPER, step=step)
        grad = torch.randn(n, generator=torch.Generator().manual_seed(step))
        ours = _stepped(ours | {"grad": grad}, hyper)
        parameter = torch.nn.Parameter(theirs["weight"].clone())
        parameter.grad = grad
        optimizer = torch.optim.AdamW(
            [parameter], lr=hyper.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True
        )
        floats = {name: _decoded(theirs, name) for name in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(step - 1.0), **floats}
        optimizer.step()
        theirs = {"weight": parameter.detach(), **_encoded(floats, dtype, hyper, ORIGIN)}
        _assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_gives_the_same_bits_on_any_number_of_threads_and_isa(dtype: torch.dtype) -> None:
    state = _state("halves", dtype, 300_001)
    expected = _stepped(state)
    for name in available_isas():
        set_isa(name)
        for threads in (1, 3):
            _assert_same_bits(_stepped(state, threads=threads), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 2**32 - 1024, 2**40 + 256])
def test_step_in_pieces_gives_the_same_bits(layout: str, dtype: torch.dtype, first: int) -> None:
    n = 3000
    state = _state(layout, dtype, n)
    whole = _stepped(state, origin=Origin(parameter=5, first=first))
    _assert_same_bits(whole, _expected(state, HYPER, Origin(parameter=5, first=first)))
    cuts = [0, 256, 256, 1024, 2560, n] if dtype == torch.uint8 else [0, 1, 2, 19, 1024, 1025, n]
    pieces = {name: tensor.clone() for name, tensor in state.items()}
    for begin, end in pairwise(cuts):
        blocks = slice(begin // MOMENT_BLOCK, -(-end // MOMENT_BLOCK))
        part = {
            name: tensor[blocks if name.endswith("_scale") else slice(begin, end)]
            for name, tensor in pieces.items()
        }
        part.setdefault("rest", None)  # type: ignore[arg-type]
        adam_step(
            **part,  # type: ignore[arg-type]
            hyper=HYPER,
            origin=Origin(parameter=5, first=first + begin),
        )
    del pieces["grad"]
    _assert_same_bits(pieces, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_differs_between_steps_parameters_and_elements(dtype: torch.dtype) -> None:
    n = 4096
    state = {
        name: torch.full_like(tensor, 1) for name, tensor in _state("master", dtype, n).items()
    }
    state["grad"] = torch.full((n,), 0.77)
    state["grad"][::MOMENT_BLOCK] = 5.0  # or all are the largest of their block, exactly
    found = [
        _stepped(state, replace(HYPER, step=step), Origin(parameter=parameter, first=first))
        for step, parameter, first in ((3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 4096))
    ]
    assert all(len(one["exp_avg"].unique()) > 1 for one in found)
    for one, other in pairwise([*found, found[0]]):
        same = (one["exp_avg"] == other["exp_avg"]).float().mean()
        assert 0.2 < same < 0.95


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    """Moments whose change is far below a step of their format still change, by as much."""
    n, steps = 1 << 16, 40
    state = {
        "weight": torch.zeros(n),
        "grad": torch.zeros(n),
        "exp_avg": torch.full((n,), 1.0),
        "exp_avg_sq": torch.full((n,), 1.0),
    }
    floats = state
    if dtype == torch.bfloat16:
        coded = state | {name: state[name].to(dtype) for name in _MOMENTS}
    else:
        # One element in a block keeps the scale at 1, the others are what is looked at.
        state["exp_avg"][::MOMENT_BLOCK] = state["exp_avg_sq"][::MOMENT_BLOCK] = 8.0
        coded = state | _encoded(state, dtype, HYPER, ORIGIN)
    for step in range(1, steps + 1):
        hyper = replace(HYPER, step=step, beta1=0.999, weight_decay=0.0)
        floats = {"grad": state["grad"], **_stepped(floats, hyper)}
        coded = {"grad": state["grad"], **_stepped(coded, hyper)}
    for name in _MOMENTS:
        looked_at = torch.arange(n) % MOMENT_BLOCK != 0
        expected = floats[name][looked_at].double().mean()
        found = _decoded(coded, name)[looked_at].double()
        error = (found.mean() - expected).abs()
        assert error <= 5 * found.std() / n**0.5, name
        assert error < 0.1 * (1.0 - expected), name


def test_codes_are_floats_of_three_bits_and_end_at_one() -> None:
    signed, unsigned = values_of_codes(True), values_of_codes(False)
    assert signed[127] == unsigned[255] == 1.0
    assert signed[1] == 2.0**-16 * 1.25
    assert unsigned[1] == 2.0**-32 * 1.25
    assert (signed[128:] == -signed[:128]).all()
    for magnitudes in (signed[:128], unsigned):
        ratios = magnitudes[2:] / magnitudes[1:-1]
        assert ratios.min() > 1.0
        assert ratios.max() <= 1.125


def test_exp_avg_sq_that_is_not_zero_stays_so() -> None:
    n = MOMENT_BLOCK
    state = _state("master", torch.uint8, n)
    state |= {name: torch.zeros_like(state[name]) for name in state if name.startswith("exp")}
    state["grad"] = torch.full((n,), 1e-15)
    state["grad"][0] = 1e3
    state["grad"][5] = 0.0
    after = _stepped(state, replace(HYPER, step=1))
    codes = after["exp_avg_sq"]
    assert codes[0] == 255
    assert codes[5] == 0
    assert (codes[6:] == 1).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none_and_spoils_its_block_at_most(
    dtype: torch.dtype, bad: float
) -> None:
    state = _state("master", dtype, 4 * MOMENT_BLOCK)
    good = _stepped(state)
    state["grad"][MOMENT_BLOCK + 3] = bad
    found = {}
    for name in available_isas():
        set_isa(name)
        found[name] = _stepped(state)
        _assert_same_bits(found[name], found["scalar"] if "scalar" in found else found[name])
    after = found["scalar"]
    spoilt = torch.arange(4 * MOMENT_BLOCK) // MOMENT_BLOCK == 1
    if dtype == torch.bfloat16:
        spoilt = torch.arange(4 * MOMENT_BLOCK) == MOMENT_BLOCK + 3
    for name in _MOMENTS:
        values = _decoded(after, name)
        assert not values[spoilt].isfinite().any(), name
        assert torch.equal(values[~spoilt], _decoded(good, name)[~spoilt]), name
    _assert_same_bits({name: found[available_isas()[0]][name] for name in after}, after)


@pytest.mark.parametrize("isa", available_isas())
def test_finite_moments_beyond_the_last_bf16_stay_finite(isa: str) -> None:
    set_isa(isa)
    state = _state("master", torch.bfloat16, 4096)
    largest = torch.finfo(torch.float32).max
    state["exp_avg"].fill_(-torch.finfo(torch.bfloat16).max)
    state["exp_avg_sq"].fill_(0.0)
    state["grad"].fill_(-largest)
    after = _stepped(state, replace(HYPER, beta2=0.0, grad_scale=1.0))
    assert (after["exp_avg"] == -torch.finfo(torch.bfloat16).max).all()
    assert after["exp_avg_sq"].isposinf().all()  # the square is beyond float32


def test_step_refuses_scales_and_origins_that_do_not_fit() -> None:
    n = 300
    state = _state("master", torch.uint8, n)
    for change, error, match in (
        ({"exp_avg_scale": None}, TypeError, "exp_avg_scale is missing and exp_avg torch.uint8"),
        ({"exp_avg_sq_scale": torch.zeros(1)}, ValueError, r"shape \(1,\) where \(2,\) is due"),
        ({"exp_avg_sq": torch.zeros(n)}, TypeError, "exp_avg_sq is torch.float32"),
        ({"origin": None}, TypeError, "pass origin="),
        ({"origin": Origin(parameter=0, first=100)}, ValueError, "not a multiple of 256"),
        ({"origin": Origin(parameter=-1)}, ValueError, "must not be negative"),
    ):
        arguments = {**state, "rest": None, "hyper": HYPER, "origin": ORIGIN, **change}
        with pytest.raises(error, match=match):
            adam_step(**arguments)  # type: ignore[arg-type]
    floats = _state("master", torch.bfloat16, n) | {"exp_avg_scale": torch.zeros(2)}
    with pytest.raises(TypeError, match=r"exp_avg_scale is given and exp_avg torch\.bf"):
        adam_step(**floats, rest=None, hyper=HYPER, origin=ORIGIN)  # type: ignore[arg-type]
