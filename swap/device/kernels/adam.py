"""One step of Adam over arrays in the memory of a device: the bits of ``swap.kernels.adam_step``.

On a CUDA device it is one kernel, compiled when it is first needed there. Where that cannot be, a
warning says so once, and operations of torch do the same, slower and with ``SCRATCH_BYTES`` of
memory; so they do on any other device.
"""

from __future__ import annotations

import functools
import importlib.resources
import logging

import torch

from swap._native import ffi
from swap.adam import MOMENT_BLOCK, AdamHyper, AdamJob, AdamTensors, Origin, adam_job
from swap.device.kernels import elementwise
from swap.device.kernels.elementwise import SCRATCH_BYTES
from swap.device.kernels.nvrtc import CompileError, Kernel, compile_kernel

__all__ = ["SCRATCH_BYTES", "adam_step"]

logger = logging.getLogger(__name__)

SOURCE = "adam.cu"
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
"""What intrinsics in the source leave to the compiler is nothing; these say the same."""
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
    kernel = _kernel(device) if device.type == "cuda" else None
    if kernel is None:
        elementwise.step(job, tensors)
    else:
        _launch(kernel, job)


def _launch(kernel: Kernel, job: AdamJob) -> None:
    num_blocks = min(-(-job.n // MOMENT_BLOCK), _MOST_BLOCKS)
    address = int(ffi.cast("uintptr_t", job))
    kernel.launch(address, num_blocks=num_blocks, num_threads=MOMENT_BLOCK)


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    """That of a device, or None, with a warning, where it cannot be had."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        code = compile_kernel(source(), architecture=f"sm_{major}{minor}", options=OPTIONS)
        return Kernel(device, code, "adam_step")
    except CompileError as error:
        logger.warning(
            "the update on %s runs as operations of torch, several times slower than as one kernel "
            "and with the same results: %s",
            device,
            error,
        )
        return None


def source() -> str:
    """The kernel in CUDA C."""
    return importlib.resources.files(__package__).joinpath(SOURCE).read_text(encoding="utf-8")
