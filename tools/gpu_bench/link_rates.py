"""How fast plain copies between registered host memory and the device are."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from samples import extremes

_COPIES = 16
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second, (median, lowest, highest): each way alone, and of both together the sum."""

    up: tuple[float, float, float]
    down: tuple[float, float, float]
    both: tuple[float, float, float]


def measure_link(device: str, nbytes: int) -> LinkRates:
    """Of copies of ``nbytes`` each, one behind the other, on a stream for each way."""
    ends = [_Way(device, nbytes, up=up) for up in (True, False)]
    return LinkRates(
        up=_rates(ends[:1], device, nbytes),
        down=_rates(ends[1:], device, nbytes),
        both=_rates(ends, device, nbytes),
    )


class _Way:
    """A stream, and memory at both ends of it."""

    def __init__(self, device: str, nbytes: int, *, up: bool) -> None:
        on_cpu = device == "cpu"
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=not on_cpu)
        there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._target, self._source = (there, host) if up else (host, there)
        self._stream: Any = None if on_cpu else torch.cuda.Stream()

    def copy(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._target.copy_(self._source, non_blocking=True)


def _rates(ways: list[_Way], device: str, nbytes: int) -> tuple[float, float, float]:
    def copy_all() -> None:
        for _ in range(_COPIES):
            for way in ways:
                way.copy()

    moved = _COPIES * len(ways) * nbytes
    _seconds(copy_all, device)
    return extremes([moved / _seconds(copy_all, device) for _ in range(_ROUNDS)])


def _seconds(work: Callable[[], None], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    """Wait for all that the device was given."""
    if device != "cpu":
        torch.cuda.synchronize()
