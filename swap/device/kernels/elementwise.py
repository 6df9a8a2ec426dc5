"""Adam as operations of torch, on any device: the bits of the C kernel, in many passes.

The formulas are those of ``csrc/kernels_impl.h``, operation by operation. Elements are taken
``CHUNK`` at a time, which bounds what is allocated beside the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swap._native import lib
from swap.adam import MOMENT_BLOCK, AdamJob, AdamTensors
from swap.device.kernels.bits import bits_of, divided_by, floats_of, fused, one_nan, square_root
from swap.device.kernels.moments import Random, moments_of
from swap.plan.sizes import DEVICE_SCRATCH_BYTES

SCRATCH_BYTES_PER_ELEMENT = 100
"""What a step allocates at most, beside its arrays, for each element of a chunk."""
CHUNK = DEVICE_SCRATCH_BYTES // SCRATCH_BYTES_PER_ELEMENT // MOMENT_BLOCK * MOMENT_BLOCK
_F16_NAN = 0x7E00


def step(job: AdamJob, tensors: AdamTensors) -> None:
    """Take the step of ``job``, a ``struct swap_adam`` made of ``tensors``, in place."""
    random = Random(job.parameter, job.step, job.first)
    moments = moments_of(tensors, job.moments)
    for part in _parts(job.first, job.n):
        p, m, v = _stepped(job, tensors, part, *moments.load(part))
        moments.store(part, m, v, random)
        _store_master(job, tensors, part, p)


def _parts(first: int, n: int) -> Iterator[slice]:
    """Chunks, whose elements have indices from ``first`` on; none has indices on both sides of a
    multiple of 2**32.
    """
    start = 0
    while start < n:
        left = (1 << 32) - ((first + start) & 0xFFFFFFFF)
        stop = min(start + CHUNK, n, start + left)
        yield slice(start, stop)
        start = stop


def _stepped(
    job: AdamJob, tensors: AdamTensors, part: slice, m: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Master and moments after the step."""
    p = _load_master(job, tensors, part)
    g = tensors.grad[part].float() * job.grad_scale
    if job.decay_mode == lib.SWAP_DECAY_WEIGHT:
        p = p * job.decay
    else:
        g = fused(job.decay, p, g)
    m = _interpolated(m, g, job.one_minus_beta1)
    v = fused(g * job.one_minus_beta2, g, v * job.beta2)
    del g
    divisor = divided_by(square_root(v), job.bias2_sqrt) + job.eps
    p = p + m * job.minus_step_size / divisor
    return one_nan(p), one_nan(m), one_nan(v)


def _interpolated(m: torch.Tensor, g: torch.Tensor, weight_of_g: float) -> torch.Tensor:
    """From the nearer end."""
    if weight_of_g < 0.5:
        return fused(weight_of_g, g - m, m)
    # As a difference of floats: the nearest one, where that of doubles has more bits.
    weight_of_m = (torch.tensor(weight_of_g, dtype=torch.float32, device="cpu") - 1.0).item()
    return fused(weight_of_m, g - m, g)


def _load_master(job: AdamJob, tensors: AdamTensors, part: slice) -> torch.Tensor:
    if job.layout == lib.SWAP_MASTER_ONLY:
        return tensors.weight[part]
    assert tensors.rest is not None
    rest = tensors.rest[part]
    if job.layout != lib.SWAP_HALVES:
        return rest
    high = tensors.weight[part].view(torch.int16).to(torch.int32)
    return floats_of((high << 16) + rest.to(torch.int32))


def _store_master(job: AdamJob, tensors: AdamTensors, part: slice, p: torch.Tensor) -> None:
    """Masters have no NaN but one."""
    weight = tensors.weight[part]
    if job.layout == lib.SWAP_MASTER_ONLY:
        weight.copy_(p)
        return
    assert tensors.rest is not None
    rest = tensors.rest[part]
    bits = bits_of(p)
    if job.layout == lib.SWAP_HALVES:
        weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
        rest.copy_(bits.view(torch.int16)[::2])  # the low half comes first in memory
        return
    rest.copy_(p)
    if job.layout == lib.SWAP_COPY_BF16:
        weight.view(torch.int16).copy_((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    else:
        weight.copy_(p)
        weight.view(torch.int16).masked_fill_(p != p, _F16_NAN)
