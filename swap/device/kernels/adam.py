"""One step of Adam over arrays in the memory of a device: the bits of ``swap.kernels.adam_step``.

On a CUDA device it is one kernel. Where that cannot be compiled, and on any other device,
operations of torch do the same, slower and with memory for what comes in between.
"""

from __future__ import annotations

from swap._native import ffi
from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin, adam_job
from swap.device.kernels import elementwise
from swap.device.kernels.compiled import kernel_of

_MOST_BLOCKS = 1 << 16


def adam_step(tensors: AdamTensors, hyper: AdamHyper, *, origin: Origin | None = None) -> None:
    """Take one Adam or AdamW step, in place, on the current stream of the tensors' device.

    Memory of the tensors is to be there until that stream has come past it. Raises TypeError for a
    dtype and ValueError for a shape, a layout or a device that cannot be.
    """
    device = tensors.weight.device
    job = adam_job(tensors, hyper, origin, device_type=device.type)
    if job.n == 0:
        return
    kernel = kernel_of(device, "adam_step")
    if kernel is None:
        elementwise.step(job, tensors)
        return
    num_blocks = min(-(-job.n // MOMENT_BLOCK), _MOST_BLOCKS)
    kernel.launch(ffi.cast("uintptr_t", job), num_blocks=num_blocks, num_threads=MOMENT_BLOCK)
