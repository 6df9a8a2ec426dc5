"""Gradients on their way from a simulated device: in pieces, bounded, and stored in order."""

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from aio import AioError, Slab
from aio.process.threads import Changes
from swap.device.interface import Stream
from swap.gradients.inbox import GradientInbox
from swap.interruptions.undo import Undo
from swap.plan.layout import PIECE
from tests.support.simulated_device import SimulatedDevice, SimulatedEvent
from tests.support.tiers import random_values, same_bits

MIB = 1 << 20


def nothing(*_: Any, **__: Any) -> None:
    """A store that keeps nothing."""


def inbox_of(
    device: SimulatedDevice,
    slab: Slab,
    store: Callable[..., object] = nothing,
    lost: list[int] | None = None,
) -> GradientInbox:
    """An inbox that notes which parameters it told of a lost gradient."""
    noted = [] if lost is None else lost
    device.register(slab)
    return GradientInbox(device, slab, store, lambda index, _: noted.append(index), Undo())


def test_inbox_stores_in_order_and_wait_waits_for_all() -> None:
    stored: list[tuple[int, torch.Tensor]] = []

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored.append((parameter, values))

    inbox = inbox_of(SimulatedDevice(), Slab(MIB), store)
    gradients = [random_values(number, 50 * number) for number in range(8)]
    for number, gradient in enumerate(gradients):
        inbox.add(number, gradient)
    inbox.wait()
    inbox.close()
    assert [parameter for parameter, _ in stored] == list(range(8))
    for (_, values), gradient in zip(stored, gradients, strict=True):
        assert same_bits(values, gradient)


def test_inbox_copies_what_was_computed_so_far() -> None:
    """Of a gradient that the program holds in another tensor, too, and changes."""
    stored: list[torch.Tensor] = []
    device = SimulatedDevice()

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored.append(values)

    inbox = inbox_of(device, Slab(MIB), store)
    gradient = random_values(1, 100)
    view = gradient[:]
    inbox.add(0, gradient)
    view.zero_()
    inbox.wait()
    inbox.close()
    device.check()
    assert same_bits(stored[0], random_values(1, 100))


@pytest.mark.parametrize("pieces", [4, 5, 33])
def test_gradient_larger_than_the_inbox_goes_in_pieces(pieces: int) -> None:
    slab, stored = Slab(4 * PIECE * 4), torch.zeros(pieces * PIECE - 5)
    ends: list[bool] = []

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored[start : start + values.numel()] += values
        ends.append(is_last)

    inbox = inbox_of(SimulatedDevice(3), slab, store)
    gradient = random_values(1, stored.numel())
    inbox.add(0, gradient)
    inbox.wait()
    inbox.close()
    assert same_bits(stored, gradient)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert slab.peak_bytes <= slab.nbytes


def test_rest_of_a_gradient_whose_first_piece_failed_is_not_stored() -> None:
    stored: list[tuple[int, int]] = []

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored.append((parameter, start))
        if parameter == 0:
            raise AioError("full", errno=errno.ENOSPC)

    lost: list[int] = []
    inbox = inbox_of(SimulatedDevice(eager=True), Slab(4 * PIECE * 4), store, lost)
    for parameter in range(2):
        inbox.add(parameter, random_values(parameter, 3 * PIECE))
    inbox.wait()
    inbox.close()
    assert lost == [0]
    assert stored == [(0, 0), (1, 0), (1, PIECE), (1, 2 * PIECE)]


def test_small_gradients_that_come_together_are_waited_for_once() -> None:
    device, may_begin = SimulatedDevice(), threading.Event()
    waits: list[Stream] = []

    class Counting(SimulatedDevice):
        def wait(self, event: SimulatedEvent) -> None:
            may_begin.wait()
            waits.append(event.stream)
            super().wait(event)

    device = Counting()
    inbox = inbox_of(device, Slab(MIB))
    for number in range(20):
        inbox.add(number, random_values(number, 50))
    may_begin.set()
    inbox.wait()
    inbox.close()
    assert len(waits) <= 2


@pytest.mark.parametrize("kind", ["negative", "conjugated"])
def test_inbox_copies_values_and_not_what_lies_in_memory(kind: str) -> None:
    stored: list[torch.Tensor] = []

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored.append(values)

    gradient = torch.complex(random_values(1, 64), random_values(2, 64)).conj()
    if kind == "negative":
        gradient = gradient.imag
    inbox = inbox_of(SimulatedDevice(), Slab(MIB), store)
    inbox.add(0, gradient)
    inbox.wait()
    inbox.close()
    assert torch.equal(stored[0], gradient.resolve_conj().resolve_neg())


def test_inbox_is_bounded_by_its_slab_and_waits_for_room() -> None:
    slab = Slab(2 * PIECE * 4)
    inbox = inbox_of(SimulatedDevice(), slab)
    for number in range(20):
        inbox.add(0, random_values(number, PIECE))
    inbox.wait()
    inbox.close()
    assert slab.peak_bytes <= 2 * PIECE * 4
    assert slab.used_bytes == 0


def test_those_who_wait_do_not_wake_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open, tells = threading.Event(), list[None]()
    tell = Changes.tell

    def counted(changes: Changes) -> None:
        tells.append(None)
        tell(changes)

    inbox = inbox_of(SimulatedDevice(eager=True), Slab(MIB), lambda *_, **__: is_open.wait(60))
    inbox.add(0, random_values(0, PIECE))
    monkeypatch.setattr(Changes, "tell", counted)
    waiting = [threading.Thread(target=inbox.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.2)
    num_tells = len(tells)
    is_open.set()
    for thread in waiting:
        thread.join()
    inbox.close()
    assert num_tells <= 6


def test_failure_to_store_loses_that_gradient_and_no_memory() -> None:
    """What failed is a traceback deep enough to hold the buffer, in a slab that has no other."""

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        if parameter == 1:
            failure = AioError("full", errno=errno.ENOSPC)
            raise failure

    lost: list[int] = []
    inbox = inbox_of(SimulatedDevice(eager=True), Slab(PIECE * 4), store, lost)
    with without_collections():
        for parameter in range(3):
            inbox.add(parameter, random_values(parameter, PIECE))
        inbox.wait()
    assert lost == [1]
    inbox.close()
    inbox.close()


@contextmanager
def without_collections() -> Iterator[None]:
    """No cycle is found by chance."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_gradient_of_which_no_piece_has_room_is_lost_at_once() -> None:
    lost: list[int] = []
    inbox = inbox_of(SimulatedDevice(eager=True), Slab(PIECE), lost=lost)
    inbox.add(0, random_values(1, 2 * PIECE))
    inbox.wait()
    assert lost == [0]
    inbox.close()


def test_gradients_wait_on_the_device_until_there_is_room_for_them() -> None:
    """The backward pass goes on, as far as their memory may lie there."""
    stored: list[int] = []

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        stored.append(parameter)

    may_end, is_waited_for = threading.Event(), threading.Event()

    class Stuck(SimulatedDevice):
        def wait(self, event: SimulatedEvent) -> None:
            is_waited_for.set()
            may_end.wait()
            super().wait(event)

    stuck, slab = Stuck(), Slab(PIECE * 4)
    stuck.register(slab)
    most = 3 * PIECE * 4
    inbox = GradientInbox(stuck, slab, store, lambda *_: None, Undo(), most_coming_bytes=most)
    for number in range(5):  # one in the slab, three below the limit, one that passes it
        inbox.add(number, random_values(number, PIECE))
    thread = threading.Thread(target=inbox.add, args=(5, random_values(5, PIECE)))
    thread.start()
    assert is_waited_for.wait(10.0)
    assert (stored, len(inbox._coming), thread.is_alive()) == ([], 4, True)
    may_end.set()
    thread.join()
    inbox.wait()
    inbox.close()
    assert stored == list(range(6))
    assert slab.peak_bytes <= slab.nbytes
    stuck.check()


def test_gradient_waits_for_memory_of_one_that_is_stored_and_not_yet_let_go_of() -> None:
    kept: list[torch.Tensor] = []
    slab = Slab(PIECE * 4)

    def store(parameter: int, start: int, values: torch.Tensor, *, is_last: bool) -> None:
        kept.append(values)

    inbox = inbox_of(SimulatedDevice(eager=True), slab, store)
    inbox.add(0, random_values(0, PIECE))
    inbox.wait()
    wait_for_release = slab.wait_for_release

    def let_go(timeout: float) -> bool:
        kept.clear()
        return wait_for_release(timeout)

    with patch.object(slab, "wait_for_release", let_go):
        inbox.add(1, random_values(1, PIECE))
        inbox.wait()
    assert same_bits(kept[0], random_values(1, PIECE))
    inbox.close()
