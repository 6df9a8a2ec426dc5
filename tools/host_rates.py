"""Rates of a host apart from I/O: the AdamW kernel and the storing of gradients, each alone.

Benchmarks write it down beside their results, for ``bound_steps.py`` to compare them with.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from samples import cpu_name, seconds_of

from swap.adam import AdamHyper
from swap.kernels import adam_step, sum_of_squares

_ELEMENTS = 4 << 20
"""As many as a subgroup of a small budget has: more than caches hold."""
_TENSORS = 6
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """``adam``: parameters a second; ``gradients``: bytes a second stored and squared."""

    adam: float
    gradients: float


def measure_host(dtype: torch.dtype) -> HostRates:
    """Medians of some rounds over tensors that are no longer in any cache when their turn comes."""
    states = [_State(dtype) for _ in range(_TENSORS)]
    hyper = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=2)

    def update() -> None:
        for state in states:
            state.step(hyper)

    def store() -> None:
        for state in states:
            state.store()

    elements = _TENSORS * _ELEMENTS
    return HostRates(
        adam=elements / _seconds(update), gradients=elements * dtype.itemsize / _seconds(store)
    )


def describe_machine() -> dict[str, Any]:
    """What a result needs beside it to mean something."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


class _State:
    """The components and the gradient of one subgroup."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._weight = torch.zeros(_ELEMENTS, dtype=dtype)
        self._rest = None
        if dtype == torch.bfloat16:
            self._rest = torch.zeros(_ELEMENTS, dtype=torch.int16)
        elif dtype == torch.float16:
            self._rest = torch.zeros(_ELEMENTS)
        self._first, self._second = torch.zeros(_ELEMENTS), torch.zeros(_ELEMENTS)
        self._gradient = torch.full((_ELEMENTS,), 1e-3, dtype=dtype)
        self._home = torch.zeros(_ELEMENTS, dtype=dtype)

    def step(self, hyper: AdamHyper) -> None:
        adam_step(
            weight=self._weight,
            rest=self._rest,
            exp_avg=self._first,
            exp_avg_sq=self._second,
            grad=self._gradient,
            hyper=hyper,
        )

    def store(self) -> None:
        sum_of_squares(self._gradient, copy=self._home)


def _seconds(work: Callable[[], None]) -> float:
    work()
    return statistics.median(seconds_of(work) for _ in range(_ROUNDS))
