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
import os
from typing import TYPE_CHECKING

import torch

from swap._native import ffi, lib
from swap.adam import FLOATS, AdamHyper, AdamTensors, Origin, adam_job, address, old_arrays
from swap.plain import check_array, plain
from swap.processors import num_threads

if TYPE_CHECKING:
    from cffi import FFI

BLOCK = lib.SWAP_BLOCK
"""Elements that ``sum_of_squares`` adds up by themselves."""


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
    old: AdamTensors | None = None,
    threads: int | None = None,
) -> None:
    """Take one Adam or AdamW step over ``n`` elements, in place, or from the values in ``old``.

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
    The arrays of ``old`` are like the others, ``grad`` not counted, overlap none of them, and do
    not change; what the others have is not read then, and is written past the caches.
    ``threads`` counts the calling one; None takes as many as torch computes with, or in a thread
    that stays in the background every CPU that the process may use.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    tensors = AdamTensors(
        weight=weight,
        rest=rest,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=grad,
        exp_avg_scale=exp_avg_scale,
        exp_avg_sq_scale=exp_avg_sq_scale,
    )
    adam_step_of(tensors, hyper, origin=origin, old=old, threads=threads)


def adam_step_of(
    tensors: AdamTensors,
    hyper: AdamHyper,
    *,
    origin: Origin | None,
    old: AdamTensors | None = None,
    threads: int | None = None,
) -> None:
    """As ``adam_step``."""
    job = adam_job(tensors, hyper, origin)
    before = ffi.NULL if old is None else old_arrays(old, tensors)
    status = lib.swap_adam_step(job, before, num_threads(threads))
    _raise_on_error(status, "update", tensors.weight.numel())


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
    check_array("master", master, n, torch.float32)
    check_array("hi", hi, n, torch.bfloat16)
    check_array("lo", lo, n, torch.int16)
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
    check_array("hi", hi, n, torch.bfloat16)
    check_array("lo", lo, n, torch.int16)
    check_array("out", out, n, torch.float32)
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
    check_array("source", source, n, torch.uint8)
    check_array("target", target, n, torch.uint8)
    status = lib.swap_copy(address(source), address(target), n, num_threads(threads))
    _raise_on_error(status, "copy", n)


def copy_values(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between flat tensors of one dtype.

    Within host memory not by torch, which would make a team of OpenMP threads for each thread that
    calls this, beside the one that computes. On two cores steps were 1 to 4 % shorter without, in
    two pairs of runs.
    """
    if source.device.type == target.device.type == "cpu":
        copy_bytes(plain(source).view(torch.uint8), target.view(torch.uint8))
    else:
        target.copy_(source)


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
    check_array("grad", grad, n, *FLOATS)
    total = ffi.new("double *", carry)
    status = lib.swap_sum_of_squares(
        address(grad), FLOATS[grad.dtype], n, _copy(grad, copy), total, num_threads(threads)
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
    check_array("grad", grad, n, *FLOATS)
    sums = torch.zeros(-(-n // BLOCK), dtype=torch.float64, device="cpu")
    status = lib.swap_block_squares(
        address(grad),
        FLOATS[grad.dtype],
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
    check_array("copy", copy, values.numel(), values.dtype)
    return address(copy)


def _raise_on_error(status: int, what: str, n: int) -> None:
    if status == 0:
        return
    # Whatever else C refuses was refused above.
    assert status == -errno.ENOMEM, status
    raise MemoryError(f"cannot {what} {n} elements: {os.strerror(errno.ENOMEM)}")
