"""Adam on the CPU in one pass over memory, and the small passes around it.

Everything works in place on 1-D contiguous CPU tensors through their addresses. The GIL is
released, autograd is not told (version counters stay) and no tensor is kept. Several threads may
call at once as long as no two write to the same memory; the tensors of one call must not overlap.

Invariant: a result depends on its inputs alone, to the last bit: not on the number of threads, the
instruction set or the address, nor on how a tensor is cut into pieces. All NaNs that the kernels
store are the same one; a sum of squares of which some are NaN is a NaN, and not always the same.

The update rounds as torch's fused Adam for fp32 does in its vector code, so that
``torch.optim.AdamW(fused=True)`` gives the same bits whatever its number of threads. Only the last
elements of a tensor, which fill no vector of torch's (8 or 16), differ by at most one unit in the
last place a step: torch rounds those in scalar code, in part in double. Following it there would
break the invariant, since which elements they are depends on the machine and on the cut.
"""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swap._native import ffi, lib
from swap.plain import check_plain
from swap.processors import num_threads

if TYPE_CHECKING:
    from cffi import FFI

BLOCK = lib.SWAP_BLOCK
"""Elements that ``sum_of_squares`` adds up by themselves."""

MOMENT_BLOCK = lib.SWAP_MOMENT_BLOCK
"""Elements that share a scale where moments are kept in 8 bits."""

_FLOATS = {
    torch.float32: lib.SWAP_F32,
    torch.bfloat16: lib.SWAP_BF16,
    torch.float16: lib.SWAP_F16,
}
_MOMENTS = {
    torch.float32: lib.SWAP_MOMENTS_F32,
    torch.bfloat16: lib.SWAP_MOMENTS_BF16,
    torch.uint8: lib.SWAP_MOMENTS_U8,
}
_LAYOUTS = {
    (torch.bfloat16, torch.int16): lib.SWAP_HALVES,
    (torch.bfloat16, torch.float32): lib.SWAP_COPY_BF16,
    (torch.float16, torch.float32): lib.SWAP_COPY_F16,
    (torch.float32, None): lib.SWAP_MASTER_ONLY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamHyper:
    """What one Adam step depends on besides its tensors.

    ``step`` is the number of this step and counts from 1. ``grad_scale`` multiplies every gradient
    before it is used: the inverse of a loss scale, times the clipping coefficient. ``decoupled`` is
    the weight decay of AdamW; without it the decay is added to the gradient, as in Adam.

    Raises ValueError for a value out of range.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ValueError(f"{name}={value} must be 0 or more")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value} must be in [0, 1)")
        if self.step < 1:
            raise ValueError(f"step={self.step} must be 1 or more; the first step is number 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which elements a call is about: from element ``first`` of ``parameter``, a number for it.

    Moments of fewer than 32 bits are rounded by random bits that are a function of this and of
    the step alone.
    """

    parameter: int
    first: int = 0


def adam_step(
    *,
    weight: torch.Tensor,
    rest: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: AdamHyper,
    exp_avg_scale: torch.Tensor | None = None,
    exp_avg_sq_scale: torch.Tensor | None = None,
    origin: Origin | None = None,
    threads: int | None = None,
) -> None:
    """Take one Adam or AdamW step over ``n`` elements, in place.

    The dtypes of ``weight`` and ``rest`` say how the weights are kept:

    - bfloat16 and int16: the two halves of the fp32 master (see ``split_master``);
    - bfloat16 or float16, and float32: ``rest`` is the master, ``weight`` the copy that computes,
      which is not read but written anew, rounded to nearest even;
    - float32 and None: ``weight`` is the master.

    ``exp_avg`` and ``exp_avg_sq`` are of one dtype:

    - float32;
    - bfloat16, rounded stochastically;
    - uint8, codes (see ``csrc/moments_impl.h``) that are rounded stochastically, with the scales
      of blocks of MOMENT_BLOCK elements in ``exp_avg_scale`` and ``exp_avg_sq_scale``, float32. A
      tensor begins at a whole block, and one value that is not finite spoils its block.

    The last two take an ``origin``. ``grad`` is float32, bfloat16 or float16 and does not change.
    ``threads`` counts the calling one; None takes as many as torch computes with, or in a thread
    that stays in the background every CPU that the process may use.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    rest_dtype = None if rest is None else rest.dtype
    layout = _LAYOUTS.get((weight.dtype, rest_dtype))
    if layout is None:
        raise TypeError(
            f"weight is {weight.dtype} and rest {rest_dtype}; pass torch.bfloat16 with torch.int16,"
            " torch.bfloat16 or torch.float16 with torch.float32, or torch.float32 with None"
        )
    n = weight.numel()
    _check("weight", weight, n, weight.dtype)
    if rest is not None:
        _check("rest", rest, n, rest.dtype)
    _check("exp_avg", exp_avg, n, *_MOMENTS)
    _check("exp_avg_sq", exp_avg_sq, n, exp_avg.dtype)
    _check("grad", grad, n, *_FLOATS)
    scales = _scales(n, exp_avg.dtype, exp_avg_scale, exp_avg_sq_scale)
    job = ffi.new(
        "struct swap_adam *",
        {
            "weight": _address(weight),
            "rest": ffi.NULL if rest is None else _address(rest),
            "exp_avg": _address(exp_avg),
            "exp_avg_sq": _address(exp_avg_sq),
            "exp_avg_scale": scales[0],
            "exp_avg_sq_scale": scales[1],
            "moments": _MOMENTS[exp_avg.dtype],
            "grad": _address(grad),
            "n": n,
            "layout": layout,
            "grad_float": _FLOATS[grad.dtype],
            **_scalars(hyper),
            **_counter(exp_avg.dtype, hyper.step, origin),
        },
    )
    _raise_on_error(lib.swap_adam_step(job, num_threads(threads)), "update", n)


def _scales(n: int, dtype: torch.dtype, *scales: torch.Tensor | None) -> list[FFI.CData]:
    """The addresses of the scales, one for each block; NULL where moments have none."""
    blocks = -(-n // MOMENT_BLOCK)
    for name, scale in zip(("exp_avg_scale", "exp_avg_sq_scale"), scales, strict=True):
        if (scale is not None) != (dtype == torch.uint8):
            raise TypeError(
                f"{name} is {'missing' if scale is None else 'given'} and exp_avg {dtype}; pass "
                "scales with torch.uint8, and only then"
            )
        if scale is not None:
            _check(name, scale, blocks, torch.float32)
    return [ffi.NULL if s is None else ffi.cast("float *", s.data_ptr()) for s in scales]


def _counter(dtype: torch.dtype, step: int, origin: Origin | None) -> dict[str, int]:
    """What random bits are a function of, in the kernel's terms."""
    if dtype == torch.float32:
        return {"parameter": 0, "step": step, "first": 0}
    if origin is None:
        raise TypeError(f"exp_avg is {dtype}; pass origin=, by which it is rounded")
    if origin.parameter < 0 or origin.first < 0:
        raise ValueError(f"{origin} must not be negative")
    if dtype == torch.uint8 and origin.first % MOMENT_BLOCK:
        raise ValueError(
            f"first={origin.first} is not a multiple of {MOMENT_BLOCK}, the elements of a block"
        )
    return {"parameter": origin.parameter, "step": step, "first": origin.first}


def _scalars(hyper: AdamHyper) -> dict[str, float]:
    """What the kernel's formulas take, computed in double as torch does and rounded to float."""
    # Without decay nothing may be added to the gradient: 0 times an infinite weight is NaN.
    in_gradient = not hyper.decoupled and hyper.weight_decay != 0.0
    on_weight = 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled else 1.0
    return {
        "decay_mode": lib.SWAP_DECAY_GRADIENT if in_gradient else lib.SWAP_DECAY_WEIGHT,
        "decay": hyper.weight_decay if in_gradient else on_weight,
        "grad_scale": hyper.grad_scale,
        "one_minus_beta1": 1.0 - hyper.beta1,
        "beta2": hyper.beta2,
        "one_minus_beta2": 1.0 - hyper.beta2,
        "bias2_sqrt": math.sqrt(1.0 - hyper.beta2**hyper.step),
        "eps": hyper.eps,
        "minus_step_size": -hyper.lr / (1.0 - hyper.beta1**hyper.step),
    }


def split_master(
    master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, *, threads: int | None = None
) -> None:
    """Write the halves of the float32 ``master`` to ``hi`` (bfloat16) and ``lo`` (int16).

    ``hi`` is the bfloat16 nearest to the master, ties away from zero, and ``lo`` the difference of
    the bit patterns, so that ``(hi << 16) + lo`` is the master. Every value comes back bit for bit
    but those NaNs whose ``hi`` would be no NaN: they become the quiet NaN of their sign.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    n = master.numel()
    _check("master", master, n, torch.float32)
    _check("hi", hi, n, torch.bfloat16)
    _check("lo", lo, n, torch.int16)
    status = lib.swap_split(
        ffi.cast("float *", master.data_ptr()),
        ffi.cast("uint16_t *", hi.data_ptr()),
        ffi.cast("int16_t *", lo.data_ptr()),
        n,
        num_threads(threads),
    )
    _raise_on_error(status, "split", n)


def merge_master(
    hi: torch.Tensor, lo: torch.Tensor, out: torch.Tensor, *, threads: int | None = None
) -> None:
    """Write to ``out`` the float32 masters whose halves are ``hi`` (bfloat16) and ``lo`` (int16).

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    n = hi.numel()
    _check("hi", hi, n, torch.bfloat16)
    _check("lo", lo, n, torch.int16)
    _check("out", out, n, torch.float32)
    status = lib.swap_merge(
        ffi.cast("uint16_t *", hi.data_ptr()),
        ffi.cast("int16_t *", lo.data_ptr()),
        ffi.cast("float *", out.data_ptr()),
        n,
        num_threads(threads),
    )
    _raise_on_error(status, "merge", n)


def copy_bytes(source: torch.Tensor, target: torch.Tensor, *, threads: int | None = None) -> None:
    """Copy uint8 ``source`` to ``target``, past the caches: for memory that is not read soon.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    n = source.numel()
    _check("source", source, n, torch.uint8)
    _check("target", target, n, torch.uint8)
    status = lib.swap_copy(_address(source), _address(target), n, num_threads(threads))
    _raise_on_error(status, "copy", n)


def sum_of_squares(
    grad: torch.Tensor,
    carry: float = 0.0,
    *,
    copy: torch.Tensor | None = None,
    threads: int | None = None,
) -> float:
    """Return ``carry`` plus the squares of ``grad`` (float32, bfloat16 or float16), in double.

    With ``copy``, an array of the same kind, ``grad`` is copied there in the same pass over memory.

    Blocks of BLOCK elements are summed by themselves and added to ``carry`` one after the other:
    folding over consecutive pieces, each but the last a multiple of BLOCK elements long, gives the
    same bits as one call on the whole.

    Raises TypeError for a dtype, ValueError for a shape, a layout or a device that cannot be, and
    MemoryError where 8 bytes for each block cannot be had.
    """
    n = grad.numel()
    _check("grad", grad, n, *_FLOATS)
    total = ffi.new("double *", carry)
    status = lib.swap_sum_of_squares(
        _address(grad), _FLOATS[grad.dtype], n, _copy(grad, copy), total, num_threads(threads)
    )
    _raise_on_error(status, "sum", n)
    return float(total[0])


def block_squares(
    grad: torch.Tensor, *, copy: torch.Tensor | None = None, threads: int | None = None
) -> torch.Tensor:
    """Return the sum of squares of every block of BLOCK elements of ``grad``, in float64.

    Added up one after the other they are what ``sum_of_squares`` returns, bit for bit. Copies and
    raises as that.
    """
    n = grad.numel()
    _check("grad", grad, n, *_FLOATS)
    sums = torch.zeros(-(-n // BLOCK), dtype=torch.float64, device="cpu")
    status = lib.swap_block_squares(
        _address(grad),
        _FLOATS[grad.dtype],
        n,
        _copy(grad, copy),
        ffi.cast("double *", sums.data_ptr()),
        num_threads(threads),
    )
    _raise_on_error(status, "sum", n)
    return sums


def _copy(values: torch.Tensor, copy: torch.Tensor | None) -> FFI.CData:
    if copy is None:
        return ffi.NULL
    _check("copy", copy, values.numel(), values.dtype)
    return _address(copy)


def _address(tensor: torch.Tensor) -> FFI.CData:
    return ffi.cast("void *", tensor.data_ptr())


def _check(name: str, tensor: torch.Tensor, n: int, *dtypes: torch.dtype) -> None:
    """Raise unless C may take ``tensor`` for an array of ``n`` elements of one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} is {tensor.dtype}; pass {wanted}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}; pass a dense tensor on the CPU"
        )
    if tensor.dim() != 1 or tensor.numel() != n:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} where ({n},) is due; pass flat tensors of"
            " equal length"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}; pass a contiguous tensor")
    check_plain(name, tensor)


def _raise_on_error(status: int, what: str, n: int) -> None:
    if status == 0:
        return
    # Whatever else C refuses was refused above.
    assert status == -errno.ENOMEM, status
    raise MemoryError(f"cannot {what} {n} elements: {os.strerror(errno.ENOMEM)}")
