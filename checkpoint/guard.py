"""Optimizers that wait for saves: `step()` begins when those saves have read their bytes."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from checkpoint.pending import PendingSave


class Guard(Protocol):
    """What a guard has to be: `torch.optim.Optimizer` is one."""

    def register_step_pre_hook(self, hook: Any, /) -> Any: ...


class _Gate:
    """The saves that one optimizer waits for. Its hook stays and costs next to nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[PendingSave] = []

    def add(self, pending: PendingSave) -> None:
        with self._lock:
            self._pending = [other for other in self._pending if not other.staged()]
            self._pending.append(pending)

    def wait(self, *_: object) -> None:
        """Called before every step; an error of a save is not the step's."""
        with self._lock:
            waiting, self._pending = self._pending, []
        for pending in waiting:
            pending.wait_staged()


_gates: weakref.WeakKeyDictionary[Any, _Gate] = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def check_guard(guard: object) -> None:
    """Raises TypeError for what cannot be made to wait."""
    if not callable(getattr(guard, "register_step_pre_hook", None)):
        raise TypeError(
            f"guard={guard!r} has no register_step_pre_hook; give a torch.optim.Optimizer"
        )


def hold_back(guard: Guard, pending: PendingSave) -> None:
    """Makes the next `guard.step()` wait until the save has read its bytes."""
    with _gates_lock:
        gate = _gates.get(guard)
        if gate is None:
            gate = _gates[guard] = _Gate()
            guard.register_step_pre_hook(gate.wait)
    gate.add(pending)
