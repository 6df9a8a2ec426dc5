"""Signals that Lightning handles by a save (SLURM's auto-requeue), wherever they come: noted where
state is half-way through a change, and handled where it is whole, as a step or a batch ends.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

from infinity.parameters.offloaded.handlers import check_not_amid

logger = logging.getLogger(__name__)


class SignalsBetweenSteps(Callback):
    """Takes the handlers that the trainer has registered for a run, from ``take`` to ``give_back``.

    They are called at once between two steps where nothing of the library is under way, as ever.
    Otherwise they are called as the step ends, with all its batches: no gradients are to be saved.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = getattr(trainer, "_signal_connector", None)
        self._handlers: dict[int, Any] = {}
        self._noted: list[int] = []
        self._is_in_step = False
        self._num_saves = 0
        self._has_ended = False

    def take(self) -> None:
        """Idempotent. Only the main thread has handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self not in self._trainer.callbacks:
            self._trainer.callbacks.append(self)  # behind those that save
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if self._is_of_trainer(handler):
                self._handlers[number] = handler
                signal.signal(number, self._come)

    def _is_of_trainer(self, handler: Any) -> bool:
        if not callable(handler) or self._connector is None:
            return False
        is_method = getattr(handler, "__self__", None) is self._connector
        return is_method or type(handler).__module__ == type(self._connector).__module__

    def give_back(self) -> None:
        """Where the module is offloaded no more. What came meanwhile cannot be saved."""
        if self in self._trainer.callbacks:
            self._trainer.callbacks.remove(self)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._come:
                signal.signal(number, handler)
        for number in [number for number in self._noted if number != signal.SIGTERM]:
            self._noted.remove(number)
            logger.warning(
                "%s came when the run had ended: nothing was saved or requeued for it",
                signal.Signals(number).name,
            )
        self.handle()

    def _come(self, number: int, frame: FrameType | None) -> None:
        is_between = not (self._is_in_step or self._num_saves or self._has_ended)
        if is_between and not _is_amid():
            self._handlers[number](number, frame)
        elif number not in self._noted:
            self._noted.append(number)

    def end(self) -> None:
        """Do what signals have asked for, the last time that it can be saved."""
        try:
            self.handle()
        finally:
            self._has_ended = True

    def handle(self) -> None:
        """Do what signals have asked for. Raises what their handlers raise."""
        while self._noted:
            number = self._noted.pop(0)
            self._handlers[number](number, sys._getframe())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A save within another would wait for its turn to give names in the folder."""
        self._num_saves += 1
        try:
            yield
        finally:
            self._num_saves -= 1

    # Hooks of the trainer.

    def on_train_batch_start(self, *_: Any) -> None:
        self._is_in_step = True

    def on_train_batch_end(self, *_: Any) -> None:
        if not self._trainer.fit_loop._should_accumulate():
            self._end_step()

    def _end_step(self) -> None:
        self._is_in_step = False
        self.handle()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._end_step()

    def on_train_end(self, *_: Any) -> None:
        self._end_step()

    def on_validation_batch_end(self, *_: Any) -> None:
        if not self._is_in_step:
            self.handle()

    def on_validation_end(self, *_: Any) -> None:
        if not self._is_in_step:
            self.handle()

    def on_test_batch_end(self, *_: Any) -> None:
        self.handle()

    def on_predict_batch_end(self, *_: Any) -> None:
        self.handle()


def _is_amid() -> bool:
    """Whether a handler that asks has broken into the midst of the library."""
    try:
        check_not_amid("a handler")
    except RuntimeError:
        return True
    return False
