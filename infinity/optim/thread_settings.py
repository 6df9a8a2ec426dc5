"""What torch computes differently by the thread that it computes on: autocast, whether numbers next
to zero count as zero, and how many threads share a sum. Updates are computed on a thread of their
own, and have what was set where their step was taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

Within = Callable[[], AbstractContextManager[None]]
"""Enters what is to be set while something is computed."""


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """``autocast``: its dtype on the CPU, None where it is off."""

    autocast: torch.dtype | None
    flushes_denormals: bool
    num_threads: int

    @staticmethod
    def here() -> ThreadSettings:
        """Those of this thread."""
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return ThreadSettings(autocast, _flushes_denormals(), torch.get_num_threads())

    @staticmethod
    def of_trials() -> AbstractContextManager[None]:
        """Inside, autocast is off."""
        return replace(ThreadSettings.here(), autocast=None).set()

    @contextmanager
    def set(self) -> Iterator[None]:
        """Inside, this thread has them. Autocast keeps no casts, which would be of weights as they
        were before the update.
        """
        before = ThreadSettings.here()
        if self == before and self.autocast is None:
            yield
            return
        if self.num_threads != before.num_threads:
            # Not undone: torch gives new threads the number that any thread has set last.
            torch.set_num_threads(self.num_threads)
        with ExitStack() as undo:
            if self.flushes_denormals != before.flushes_denormals:
                undo.callback(torch.set_flush_denormal, before.flushes_denormals)
                torch.set_flush_denormal(self.flushes_denormals)
            is_on = self.autocast is not None
            undo.enter_context(
                torch.autocast("cpu", self.autocast, enabled=is_on, cache_enabled=False)
            )
            yield


def _flushes_denormals() -> bool:
    # The processor's own setting, which numbers of Python go by, too; torch does not tell it.
    return sys.float_info.min * _HALF == 0.0


_HALF = 0.5
