"""Ctrl-C in the moment in which threads are told of a change: they find it by themselves."""

import threading
from typing import Any

import pytest
import torch

from aio import Slab
from aio.process.threads import Latch, Thread, join_thread, start_thread
from swap.gradients.inbox import GradientInbox
from swap.interruptions.undo import Undo
from tests.support.simulated_device import SimulatedDevice


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits looks often."""
    for module in ("aio.process.threads", "swap.gradients.inbox"):
        monkeypatch.setattr(f"{module}.LOOK_SECONDS", 0.01)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


class Interrupting:
    """A waiter at whose waking an interrupt comes."""

    release = interrupted


def test_latch_whose_setting_is_interrupted_ends_every_wait() -> None:
    latch, ended = Latch(), list[bool]()
    thread = Thread(lambda: ended.append(latch.wait()), "waits")
    start_thread(thread)
    while not latch._waiters:
        pass
    first: Any = Interrupting()
    latch._waiters.insert(0, first)
    with pytest.raises(KeyboardInterrupt):
        latch.set()
    join_thread(thread)
    assert ended == [True]


@pytest.mark.timeout(30)
def test_gradient_whose_coming_is_not_told_is_stored_all_the_same() -> None:
    stored = Latch()
    device, slab = SimulatedDevice(eager=True), Slab(1 << 16)
    device.register(slab)
    inbox = GradientInbox(device, slab, lambda *_, **__: stored.set(), lambda *_: None, Undo())
    tell = inbox._changes.tell
    here = threading.get_ident()
    vars(inbox._changes)["tell"] = lambda: interrupted() if threading.get_ident() == here else None
    with pytest.raises(KeyboardInterrupt):
        inbox.add(0, torch.ones(4))
    assert stored.wait(20.0)
    vars(inbox._changes)["tell"] = tell
    inbox.close()
