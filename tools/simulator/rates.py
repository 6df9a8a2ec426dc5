"""What machines do in a second: of a node with several ranks, and of one of these ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one rank, everything a second. ``UNLIMITED`` where something costs nothing.

    ``ssd_together`` bounds bytes read and written at once; ``ssd_host`` is how many of them the
    host's cores could move if they did nothing else. ``adam`` counts parameters,
    ``gradients`` bytes of gradients that are stored and squared on the host. ``network`` counts
    bytes that one rank receives; ``network_latency_seconds`` is paid by every transfer between
    ranks. On a host that computes (``computes_on_host``), computing, Adam and storing gradients
    take turns on its cores, and weights at home in memory are computed with where they are.
    """

    flops: float = UNLIMITED
    ssd_read: float
    ssd_write: float
    ssd_together: float = UNLIMITED
    ssd_host: float = UNLIMITED
    adam: float
    gradients: float = UNLIMITED
    to_device: float = UNLIMITED
    from_device: float = UNLIMITED
    network: float = UNLIMITED
    network_latency_seconds: float = 0.0
    computes_on_host: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name == "network_latency_seconds" else 1e-300
            if not isinstance(value, bool) and value < least:
                raise ValueError(f"{field.name}={value} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with ``num_devices`` of a kind. SSDs, CPU and network belong to all its ranks
    together, ``flops`` and PCIe are those of one device.

    ``peak_flops`` is what the formula of ZeRO-Infinity takes for peak: what can be reached without
    communication, ``flops`` what the replay computes with.
    """

    name: str
    num_devices: int
    flops: float
    ssd_read: float
    ssd_write: float
    ssd_together: float = UNLIMITED
    adam: float
    to_device: float
    from_device: float
    network: float
    network_latency_seconds: float
    host_memory: int
    device_memory: int

    def of_rank(self, ranks: int, world_size: int) -> Rates:
        """Those of each of ``ranks`` on this node. A rank alone has no network to wait for."""
        alone = world_size == 1
        return Rates(
            flops=self.flops,
            ssd_read=self.ssd_read / ranks,
            ssd_write=self.ssd_write / ranks,
            ssd_together=self.ssd_together / ranks,
            adam=self.adam / ranks,
            to_device=self.to_device,
            from_device=self.from_device,
            network=UNLIMITED if alone else self.network,
            network_latency_seconds=0.0 if alone else self.network_latency_seconds,
        )

    def changed(self, values: Mapping[str, Any]) -> Node:
        """A copy in which ``values`` that are not None replace what is here."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return Node(**{**mine, **{k: v for k, v in values.items() if v is not None}})
