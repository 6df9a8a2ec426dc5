"""Which devices have memory of their own, what carries out the copies of each, and what is set up
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from aio import Slab
from swap.device.cuda import CudaDevice
from swap.device.homes import DeviceHomes
from swap.device.interface import ComputeDevice
from swap.device.memory import DeviceMemory
from swap.device.visits import Visits
from swap.interruptions.undo import Undo
from swap.plan.placement import Placement
from swap.plan.spares import NUM_VISITS

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


def register_all(device: ComputeDevice | None, slabs: Iterable[Slab], undo: Undo) -> None:
    """Register host memory with ``device``, if there is one, until ``undo``."""
    if device is not None:
        for slab in slabs:
            undo.callback(device.register(slab))


def open_memory(device: ComputeDevice, placement: Placement, undo: Undo) -> DeviceMemory:
    """Memory for weights that are at home elsewhere, until ``undo``."""
    memory = DeviceMemory(device, placement.device_bytes)
    undo.callback(memory.close)
    return memory


def open_homes(
    device: ComputeDevice | None, placement: Placement, bridge: Slab | None, undo: Undo
) -> DeviceHomes | None:
    """Memory for what is at home on a device, until ``undo``; None where nothing is."""
    if device is None or bridge is None:
        return None
    homes = DeviceHomes(device, placement.device_home_bytes, bridge)
    undo.callback(homes.close)
    return homes


def open_visits(
    device: ComputeDevice | None, placement: Placement, host: Slab | None, undo: Undo
) -> Visits | None:
    """Memory for updates of what is at home in host memory, until ``undo``; None for none. The link
    is measured with ``host``, of which nothing is taken yet.
    """
    if device is None or host is None or not placement.visit_bytes:
        return None
    slot_bytes = placement.visit_bytes // NUM_VISITS
    visits = Visits(device, slot_bytes, NUM_VISITS)
    undo.callback(visits.close)
    visits.measure(torch.from_numpy(host.allocate(min(slot_bytes, host.nbytes))))
    return visits
