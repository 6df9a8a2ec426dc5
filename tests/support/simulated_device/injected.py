"""Offloading of whole models to a simulated device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from swap.device.opening import DEVICES
from tests.support.simulated_device.device import SimulatedDevice

Make = Callable[[], SimulatedDevice]


@contextmanager
def simulated(make: Make = SimulatedDevice) -> Iterator[list[SimulatedDevice]]:
    """Inside, "cpu" is a device with memory of its own. The list holds those that were made; at the
    end, what was not ordered of any is an error.
    """
    made: list[SimulatedDevice] = []

    def open_simulated(_: torch.device) -> SimulatedDevice:
        made.append(make())
        return made[-1]

    with patch.dict(DEVICES, {"cpu": open_simulated}):
        yield made
    for device in made:
        device.check()
