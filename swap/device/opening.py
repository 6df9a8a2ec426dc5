"""Which devices have memory of their own, and what carries out the copies of each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swap.device.cuda import CudaDevice
from swap.device.interface import ComputeDevice

DEVICES: dict[str, Callable[[torch.device], ComputeDevice]] = {"cuda": CudaDevice}
"""By type of device. What is not here computes in host memory."""


def is_separate(device: torch.device) -> bool:
    """Whether ``device`` computes with memory of its own, which weights are copied to."""
    return device.type in DEVICES


def open_device(device: torch.device) -> ComputeDevice | None:
    """What stands for a device with memory of its own; None for one that computes in host memory.

    ``device`` has an index where devices of its type have one.
    """
    make = DEVICES.get(device.type)
    return None if make is None else make(device)
