"""Optimizers that wait for saves: `step()` begins when those saves have read their bytes.

There are no locks in here: a step waits on the main thread, where an interrupt may come up at any
line. A save is on the list before its call returns, and comes off it when its bytes have been read.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

from checkpoint.saving.pending import PendingSave


class Guard(Protocol):
    """What a guard has to be: `torch.optim.Optimizer` is one."""

    def register_step_pre_hook(self, hook: Any, /) -> Any: ...


class Gate:
    """The saves that one optimizer waits for. Its hook stays and costs next to nothing."""

    def __init__(self) -> None:
        self._pending: list[PendingSave] = []

    def add(self, pending: PendingSave) -> None:
        """The next step waits until this save has read its bytes."""
        self._pending.append(pending)
        for other in tuple(self._pending):
            if other.staged():
                self._remove(other)

    def wait(self, *_: object) -> None:
        """Called before every step; an error of a save is not the step's."""
        for pending in tuple(self._pending):
            pending.wait_staged()
            self._remove(pending)

    def _remove(self, pending: PendingSave) -> None:
        with contextlib.suppress(ValueError):  # another thread's step was quicker
            self._pending.remove(pending)


def wait_for_saves(optimizer: Any) -> None:
    """As before a step of `optimizer`, for what changes weights and is none: waits until every save
    that it guards has read its bytes.
    """
    for hook in tuple(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()):
        gate = getattr(hook, "__self__", None)
        if isinstance(gate, Gate):
            gate.wait()


_gates: weakref.WeakKeyDictionary[Any, Gate] = weakref.WeakKeyDictionary()


def gate_of(guard: Guard) -> Gate:
    """The gate before `guard.step()`.

    Raises TypeError for what cannot be made to wait, such as a wrapper that is an optimizer by type
    and has no hooks, and what its `register_step_pre_hook` does.
    """
    if not callable(getattr(guard, "register_step_pre_hook", None)):
        raise TypeError(
            f"guard is a {type(guard).__name__}, without a register_step_pre_hook; give a "
            "torch.optim.Optimizer"
        )
    gate = _gates.get(guard)
    if gate is None:
        gate = Gate()
        # A gate that was hooked and not remembered, or hooked twice, lets everything through.
        try:
            guard.register_step_pre_hook(gate.wait)
        except AttributeError as error:
            raise TypeError(
                f"guard={type(guard).__name__} takes no hook before its step ({error}); if it "
                "wraps a torch.optim.Optimizer, give that one (guard=optimizer.optimizer)"
            ) from error
        _gates[guard] = gate
    return gate
