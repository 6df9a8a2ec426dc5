"""Actions apart: an interrupt comes before they begin or after they have ended."""

import errno
import signal
import threading
from collections.abc import Iterator

import pytest

from aio import AioError
from aio.process.threads import Thread, join_thread, start_thread
from swap.interruptions.apart import run_apart
from tests.support.keyboard import PATIENCE_SECONDS, Keyboard, keyboard_of


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    with keyboard_of(signal.SIGINT, signal.SIGTERM) as made:
        yield made


@pytest.mark.timeout(60)
@pytest.mark.parametrize("presses", [1, 2, "at once"])
def test_interrupt_of_the_waiting_is_raised_when_the_action_has_ended(
    keyboard: Keyboard, presses: int | str
) -> None:
    was_raised = threading.Event()
    steps: list[str] = []

    def action() -> None:
        if presses == "at once":
            keyboard.press(signal.SIGINT, signal.SIGTERM)
        else:
            for _ in range(int(presses)):
                keyboard.press()
        was_raised.wait(0.2)  # in vain, unless the interrupt is raised before the end
        steps.append("ended")

    with pytest.raises(KeyboardInterrupt):
        run_apart(action, "action")
    at_once = list(steps)
    was_raised.set()
    assert at_once == ["ended"]


@pytest.mark.timeout(60)
def test_thread_whose_joining_was_interrupted_can_be_joined(keyboard: Keyboard) -> None:
    goes_on = threading.Event()
    steps: list[str] = []

    def work() -> None:
        keyboard.press()
        goes_on.wait(PATIENCE_SECONDS)
        steps.append("ended")

    thread = Thread(work, "worker")

    def run() -> None:
        start_thread(thread)
        join_thread(thread)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == []
    goes_on.set()
    join_thread(thread)
    assert steps == ["ended"]


def test_thread_that_was_joined_before_it_began_never_begins() -> None:
    steps: list[str] = []
    thread = Thread(lambda: steps.append("began"), "worker")
    for _ in range(2):
        join_thread(thread)
    thread.start()
    thread.join()
    assert steps == []


def test_action_without_a_thread_to_be_had_raises_and_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    steps: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(AioError, match=r"action.*RLIMIT_NPROC") as caught:
        run_apart(lambda: steps.append("done"), "action")
    assert caught.value.errno == errno.EAGAIN
    assert steps == []


def test_error_of_the_action_is_raised() -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        run_apart(fail, "action")
