"""Machines to look at. Every figure is from where the comment says, and any can be replaced by an
option of ``bound_steps.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

_KERNEL_BYTES = 26
"""Bytes that our kernel moves for each parameter of halves: 14 read, 12 written."""
_OF_MEMORY = 0.6
"""Part of the memory's nominal bandwidth that the kernel is assumed to get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with ``num_devices`` of a kind; everything a second, memory in bytes.

    SSDs, ``adam`` (parameters that the CPUs update) belong to all ranks of the node together;
    ``flops``, links and memory are those of one device, ``network`` is what one rank receives.
    ``ssd_together`` bounds bytes read and written at once.
    """

    name: str
    num_devices: int
    flops: float
    ssd_read: float
    ssd_write: float
    ssd_together: float = float("inf")
    adam: float
    to_device: float
    from_device: float
    network: float
    host_memory: int
    device_memory: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not value > 0:
                raise ValueError(f"{field.name}={value} must be positive")

    def changed(self, values: Mapping[str, Any]) -> Node:
        """A copy in which ``values`` that are not None replace what is here."""
        return replace(self, **{name: v for name, v in values.items() if v is not None})


V100 = Node(
    name="DGX-2: 16 V100 of 32 GB",
    num_devices=16,
    # ZeRO-Infinity, section 4.2: what a V100 reaches when it does not wait.
    flops=70e12,
    # ZeRO-Infinity, figure 2b: 1.6 GB/s for each GPU, 16 of them at once.
    ssd_read=25.6e9,
    ssd_write=25.6e9,
    # 12 channels of DDR4-2666.
    adam=12 * 21.3e9 * _OF_MEMORY / _KERNEL_BYTES,
    # ZeRO-Infinity, figure 2b: 3.0 GB/s for each GPU, 16 of them at once.
    to_device=3.0e9,
    from_device=3.0e9,
    # ZeRO-Infinity, figure 2b: 60 to 100 GB/s between GPUs.
    network=60e9,
    # 1.5 TB of a node over 16 ranks, less an eighth for everything else.
    host_memory=84 << 30,
    device_memory=28 << 30,
)
"""The machine of ZeRO-Infinity and of FastPersist."""

H100 = Node(
    name="DGX H100: 8 H100 of 80 GB",
    num_devices=8,
    # Llama 3 (arXiv 2407.21783), table 4: 400 TFLOP/s of each GPU, communication included.
    flops=400e12,
    # 8 drives of PCIe 4.0, assumed 6.5 GB/s read and 3.5 GB/s written each.
    ssd_read=52e9,
    ssd_write=28e9,
    # 16 channels of DDR5-4800.
    adam=16 * 38.4e9 * _OF_MEMORY / _KERNEL_BYTES,
    # PCIe 5.0 x 16 nominally 63 GB/s; assumed 50.
    to_device=50e9,
    from_device=50e9,
    # A network card of 400 Gbit/s for each GPU.
    network=50e9,
    # 2 TB of a node over 8 ranks, less an eighth.
    host_memory=220 << 30,
    device_memory=72 << 30,
)
"""A machine of 2023."""

NODES = {"v100": V100, "h100": H100}
