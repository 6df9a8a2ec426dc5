"""The kernels of ``kernels.cu`` on a CUDA device, compiled when one is first needed there."""

from __future__ import annotations

import functools
import importlib.resources
import logging

import torch

from swap.device.kernels.nvrtc import CompileError, Kernel, compile_kernel

logger = logging.getLogger(__name__)

SOURCE = "kernels.cu"
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
"""What intrinsics in the source leave to the compiler is nothing; these say the same."""


def kernel_of(device: torch.device, name: str) -> Kernel | None:
    """That of a device. None on one that is not CUDA's, and, with one warning, where it cannot be
    had.
    """
    return _kernel(device, name) if device.type == "cuda" else None


@functools.cache
def _kernel(device: torch.device, name: str) -> Kernel | None:
    code = _code(device)
    return None if code is None else Kernel(device, code, name)


@functools.cache
def _code(device: torch.device) -> bytes | None:
    """All kernels, for a device on which they can be loaded."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        code = compile_kernel(source(), architecture=f"sm_{major}{minor}", options=OPTIONS)
        Kernel(device, code, "adam_step")
    except CompileError as error:
        logger.warning(
            "updates on %s run as operations of torch, several times slower than as one kernel "
            "and with the same results: %s",
            device,
            error,
        )
        return None
    return code


def source() -> str:
    """The kernels in CUDA C."""
    return importlib.resources.files(__package__).joinpath(SOURCE).read_text(encoding="utf-8")
