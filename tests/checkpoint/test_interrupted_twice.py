"""Saves that are interrupted more than once, and the next save to the same place."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import sheltered
from checkpoint.saving.pending import PendingSave
from checkpoint.sheltered import Worker, join_workers
from tests.support.keyboard import PATIENCE_SECONDS, keyboard_of


class Held:
    """Four bytes that are given when they are let go."""

    dtype, shape = torch.uint8, (4,)

    def __init__(self, press: Callable[[], None]) -> None:
        self._press = press
        self.is_let_go = threading.Event()
        self.ended = threading.Event()

    def read(self, start: int, out: memoryview) -> None:
        self._press()
        self.is_let_go.wait(PATIENCE_SECONDS)
        out[:] = bytes(4)
        self.ended.set()


@pytest.fixture
def let_go_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """Of these one is let go when a save waits for another."""
    held: list[Held] = []
    wait_done = PendingSave.wait_done

    def waiting(self: PendingSave, timeout: float | None = None) -> bool:
        for one in held:
            one.is_let_go.set()
        return wait_done(self, timeout)

    monkeypatch.setattr(PendingSave, "wait_done", waiting)
    return held


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_managed", [False, True])
def test_the_save_after_a_second_interrupt_waits_for_the_first_to_remove_what_it_made(
    tmp_path: Path, let_go_when_waited_for: list[Held], is_managed: bool
) -> None:
    manager = checkpoint.Manager(tmp_path / "run")

    def save(state: object) -> checkpoint.SaveInfo:
        if is_managed:
            return manager.save(1, state)
        return checkpoint.save(state, manager.path(1))

    manager.root.mkdir(exist_ok=True)
    with keyboard_of(signal.SIGINT) as keyboard:
        held = Held(lambda: (keyboard.press(), keyboard.press()))  # type: ignore[arg-type,func-returns-value]
        let_go_when_waited_for.append(held)
        with pytest.raises(KeyboardInterrupt):
            save({"s": held})
        assert not held.ended.is_set(), "the second interrupt is raised at once"
        info = save({"x": 5})
    assert held.ended.is_set()
    assert checkpoint.load(manager.path(1)) == {"x": 5}
    assert sorted(entry.name for entry in manager.path(1).iterdir()) == [info.uuid, "manifest.json"]


@pytest.mark.timeout(60)
def test_two_signals_at_once_end_a_save_when_it_has_removed_what_it_made(tmp_path: Path) -> None:
    with keyboard_of(signal.SIGINT, signal.SIGTERM) as keyboard:

        def press() -> None:
            keyboard.press(signal.SIGINT, signal.SIGTERM)
            held.is_let_go.set()

        held = Held(press)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save({"s": held}, tmp_path / "step")
        assert held.ended.is_set()
        assert not (tmp_path / "step").exists()


def test_the_interpreter_waits_for_a_worker_that_is_still_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waited for it was interrupted, and the program ends."""
    ended = threading.Event()
    start_new_thread = threading._start_new_thread  # type: ignore[attr-defined]

    def start(*arguments: object) -> object:
        time.sleep(0.2)
        return start_new_thread(*arguments)

    worker = Worker(lambda _: ended.set(), "late")
    monkeypatch.setattr(threading, "_start_new_thread", start)
    _thread.start_new_thread(worker.start, ())
    while not any(thread.name == "late" for thread in threading.enumerate()):
        time.sleep(0.001)
    join_workers()
    assert ended.is_set()


def test_the_interpreter_does_not_wait_for_ever_for_a_thread_that_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sheltered, "_MOST_START_SECONDS", 0.05)
    half = sheltered._Thread(lambda: None, "half")
    limbo = threading._limbo  # type: ignore[attr-defined]
    monkeypatch.setitem(limbo, half, half)
    with pytest.raises(RuntimeError, match="before it is started"):
        join_workers()
