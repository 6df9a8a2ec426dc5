"""Steps of Adam over tensors of all kinds, and the bits that the C kernel gives for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from hypothesis import strategies as st

from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin
from swap.kernels import adam_step

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
LAYOUTS = {
    "halves": (torch.bfloat16, torch.int16),
    "copy-bf16": (torch.bfloat16, torch.float32),
    "copy-fp16": (torch.float16, torch.float32),
    "master": (torch.float32, None),
}
GRADS = [torch.float32, torch.bfloat16, torch.float16]
MOMENTS = [torch.float32, torch.bfloat16, torch.uint8]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SPECIAL = [
    *(0x3F7F8000, 0x3F808000, 0xBF808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF),
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00008000),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF),
    *(0x33000000, 0x33000001, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x3F800000),
]
"""Bits of floats: ties of halves, zeros, subnormals, infinities, NaNs, and edges of float16."""

Step = Callable[[AdamTensors, AdamHyper, Origin], None]


def step_in_c(tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
    arrays: dict[str, Any] = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    adam_step(**arrays, hyper=hyper, origin=origin)


def mixed(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A third each of usual numbers, of any bits, and of special ones."""
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (n,), generator=generator).to(torch.int32)
    if not dtype.is_floating_point:
        return any_bits.to(_INTEGERS[dtype.itemsize]).view(dtype)
    special = torch.tensor(_SPECIAL).to(torch.int32)
    special = special[torch.randint(len(_SPECIAL), (n,), generator=generator)]
    if dtype.itemsize == 2:
        any_bits, special = any_bits.to(torch.int16), (special >> 16).to(torch.int16)
    kind = torch.randint(3, (n,), generator=generator)
    normal = torch.randn(n, generator=generator).to(dtype)
    wild = torch.where(kind == 1, any_bits.view(dtype), special.view(dtype))
    return torch.where(kind == 0, normal, wild)


def usual(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    if not dtype.is_floating_point:
        return mixed(n, dtype, seed)
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors_of(
    layout: str, grad: torch.dtype, moments: torch.dtype, n: int, *, seed: int, wild: bool
) -> AdamTensors:
    make = mixed if wild else usual
    weight, rest = LAYOUTS[layout]
    exp_avg_sq = make(n, moments, seed + 4)
    scales = {}
    if moments == torch.uint8:
        blocks = -(-n // MOMENT_BLOCK)
        for place, name in enumerate(("exp_avg_scale", "exp_avg_sq_scale")):
            scales[name] = make(blocks, torch.float32, seed + 5 + place).abs()
    elif not wild:
        exp_avg_sq = exp_avg_sq.abs()
    return AdamTensors(
        weight=make(n, weight, seed),
        rest=None if rest is None else make(n, rest, seed + 1),
        exp_avg=make(n, moments, seed + 2),
        exp_avg_sq=exp_avg_sq,
        grad=make(n, grad, seed + 3),
        **scales,
    )


def moved(tensors: AdamTensors, device: torch.device) -> AdamTensors:
    arrays = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    there: dict[str, Any] = {k: None if t is None else t.to(device) for k, t in arrays.items()}
    return AdamTensors(**there)


def _copy(tensors: AdamTensors) -> AdamTensors:
    arrays = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    copies: dict[str, Any] = {k: None if t is None else t.clone() for k, t in arrays.items()}
    return AdamTensors(**copies)


def assert_steps_alike(step: Step, tensors: AdamTensors, hyper: AdamHyper, origin: Origin) -> None:
    expected, found = _copy(tensors), _copy(tensors)
    step_in_c(expected, hyper, origin)
    step(found, hyper, origin)
    for field in fields(tensors):
        one, other = getattr(expected, field.name), getattr(found, field.name)
        if one is None:
            assert other is None
            continue
        integer = _INTEGERS[one.element_size()]
        assert torch.equal(one.view(integer), other.view(integer)), field.name


_BETAS = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999, 1 - 2**-20]), st.floats(0, 0.999))


@st.composite
def steps(draw: st.DrawFn) -> tuple[AdamTensors, AdamHyper, Origin]:
    tensors = tensors_of(
        draw(st.sampled_from(list(LAYOUTS))),
        draw(st.sampled_from(GRADS)),
        draw(st.sampled_from(MOMENTS)),
        draw(st.one_of(st.integers(0, 70), st.integers(250, 1_100))),
        seed=draw(st.integers(0, 1 << 20)),
        wild=draw(st.booleans()),
    )
    hyper = AdamHyper(
        lr=draw(st.floats(0, 10)),
        beta1=draw(_BETAS),
        beta2=draw(_BETAS),
        eps=draw(st.sampled_from([0.0, 1e-45, 1e-8, 1.0])),
        weight_decay=draw(st.sampled_from([0.0, 0.01, 1e3])),
        step=draw(st.integers(1, 1 << 40)),
        grad_scale=draw(st.floats(allow_nan=True, allow_infinity=True)),
        decoupled=draw(st.booleans()),
    )
    first = draw(st.one_of(st.integers(0, 1 << 40), st.just((1 << 32) - 2 * MOMENT_BLOCK)))
    origin = Origin(
        parameter=draw(st.integers(0, 1 << 50)), first=first // MOMENT_BLOCK * MOMENT_BLOCK
    )
    return tensors, hyper, origin
