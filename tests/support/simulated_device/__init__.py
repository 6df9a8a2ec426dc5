"""A compute device over host memory that finds what is not ordered: see ``device``."""

from tests.support.simulated_device.device import SimulatedDevice
from tests.support.simulated_device.order import OrderError, SimulatedEvent

__all__ = ["OrderError", "SimulatedDevice", "SimulatedEvent"]
