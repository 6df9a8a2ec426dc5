"""Sums of squares in the memory of a device: the bits of ``swap.kernels.block_squares``.

The C kernel adds the squares of a block of BLOCK elements in double, each to one of LINE lanes by
its place, and the lanes by halves. So do the CUDA kernel and the operations of torch here.
"""

from __future__ import annotations

import ctypes

import torch

from swap.adam import FLOATS
from swap.device.kernels.compiled import kernel_of
from swap.kernels import BLOCK
from swap.plain import check_array

LINE = 32
CHUNK_BLOCKS = 64
"""Taken at once by operations of torch: 4 MiB of doubles."""
_MOST_BLOCKS = 1 << 16


class _Job(ctypes.Structure):
    """``struct squares_job`` of ``kernels.cu``."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("kind", ctypes.c_int),
    )


def block_squares(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Set ``sums`` (float64) to the sums of squares of the blocks of ``values`` (float32, bfloat16
    or float16), on the current stream of their device.

    Raises TypeError for a dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    device, n = values.device, values.numel()
    check_array("values", values, n, *FLOATS, device_type=device.type)
    check_array("sums", sums, -(-n // BLOCK), torch.float64, device_type=device.type)
    if n == 0:
        return
    kernel = kernel_of(device, "block_squares")
    if kernel is None:
        for first in range(0, sums.numel(), CHUNK_BLOCKS):
            part = values[first * BLOCK : (first + CHUNK_BLOCKS) * BLOCK]
            sums[first : first + CHUNK_BLOCKS].copy_(_squares(part))
        return
    job = _Job(values.data_ptr(), sums.data_ptr(), n, FLOATS[values.dtype])
    num_blocks = min(sums.numel(), _MOST_BLOCKS)
    kernel.launch(ctypes.addressof(job), num_blocks=num_blocks, num_threads=LINE)


def _squares(values: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(
        -(-values.numel() // BLOCK) * BLOCK, dtype=torch.float64, device=values.device
    )
    wide[: values.numel()].copy_(values)  # what is beyond adds nothing
    lines = (wide * wide).view(-1, BLOCK // LINE, LINE)
    lanes = torch.zeros_like(lines[:, 0])
    for line in range(BLOCK // LINE):
        lanes += lines[:, line]
    width = LINE // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
        width //= 2
    return lanes.view(-1)
