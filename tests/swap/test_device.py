"""The device path over links within host memory: budgets, arrivals, and gradients on their way."""

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from aio import AioError, Slab, SlabFullError
from swap.device import DeviceArena, GradientInbox, HostLink
from swap.layout import PIECE, pack
from swap.stages import Step
from swap.tiered import TieredState
from tests.support.late_engine import Faults
from tests.support.late_link import LateEvent, LateLink
from tests.support.tiers import (
    RULE,
    Plain,
    add_to_both,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    random_values,
    same_bits,
    specs_of,
    step_both,
)

SPECS = specs_of([PIECE, 100, 2 * PIECE, 0])
MIB = 1 << 20


class StuckLink(LateLink):
    """Downloads are not finished before ``let_go``."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self, event: LateEvent) -> None:
        if event in self._down:
            self.is_waited_for.set()
            self.may_end.wait()
        super().wait(event)


def test_arena_counts_elements_until_the_last_reference_is_gone() -> None:
    arena = DeviceArena(HostLink(), 5 * PIECE * 4, None)
    first = arena.new(SPECS[0], landing=False)
    second = arena.new(SPECS[2], landing=False)
    assert arena.used_bytes == arena.peak_bytes == 3 * PIECE * 4
    with pytest.raises(SlabFullError) as caught:
        arena.new(specs_of([3 * PIECE])[0], landing=False)
    assert (caught.value.asked, caught.value.free) == (3 * PIECE * 4, 2 * PIECE * 4)
    view = second.weight[:1]
    del first, second
    assert arena.used_bytes == 2 * PIECE * 4
    del view
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 3 * PIECE * 4


def test_arena_holds_exactly_its_bytes() -> None:
    arena = DeviceArena(HostLink(), PIECE * 4 + 400, None)
    entries = [arena.new(SPECS[0], landing=False), arena.new(SPECS[1], landing=False)]
    with pytest.raises(SlabFullError):
        arena.new(specs_of([1])[0], landing=False)
    assert arena.new(SPECS[3], landing=False).weight.numel() == 0
    assert len(entries) == 2


def test_arena_is_told_when_another_thread_lets_go() -> None:
    arena = DeviceArena(HostLink(), PIECE * 4, None)
    kept = [arena.new(SPECS[0], landing=False)]
    with pytest.raises(SlabFullError):
        arena.new(SPECS[0], landing=False)
    assert not arena.wait_for_release(0.0)
    thread = threading.Thread(target=kept.clear)
    thread.start()
    assert arena.wait_for_release(10.0)
    thread.join()
    arena.new(SPECS[0], landing=False)


def test_landing_buffers_come_back_when_their_uploads_end() -> None:
    landing = Slab(PIECE * 4)
    arena = DeviceArena(LateLink(), 10 * PIECE * 4, landing)
    entry = arena.new(SPECS[0], landing=True)
    assert entry.landing is not None
    entry.landing.copy_(random_values(1, PIECE))
    entry.landed.append((0, PIECE))
    arena.arrived(entry)
    with pytest.raises(SlabFullError):
        arena.new(SPECS[0], landing=True)
    assert arena.wait_for_release(0.0)
    arena.new(SPECS[0], landing=True)
    assert same_bits(arena.ready(entry), random_values(1, PIECE))


@pytest.fixture
def stuck() -> Iterator[StuckLink]:
    link = StuckLink()
    yield link
    link.may_end.set()


def test_inbox_stores_in_order_and_collect_waits_for_all() -> None:
    stored: list[tuple[int, torch.Tensor]] = []
    inbox = GradientInbox(LateLink(), Slab(MIB), lambda p, values: stored.append((p, values)))
    gradients = [random_values(number, 50 * number) for number in range(8)]
    for number, gradient in enumerate(gradients):
        inbox.add(number, gradient)
    inbox.collect()
    inbox.close()
    assert [parameter for parameter, _ in stored] == list(range(8))
    for (_, values), gradient in zip(stored, gradients, strict=True):
        assert same_bits(values, gradient)


def test_inbox_copies_what_was_computed_so_far() -> None:
    stored: list[torch.Tensor] = []
    inbox = GradientInbox(LateLink(), Slab(MIB), lambda _, values: stored.append(values))
    gradient = random_values(1, 100)
    inbox.add(0, gradient)
    gradient.zero_()
    inbox.collect()
    inbox.close()
    assert same_bits(stored[0], random_values(1, 100))


def test_inbox_is_bounded_by_its_slab_and_waits_for_room() -> None:
    slab = Slab(2 * PIECE * 4)
    inbox = GradientInbox(LateLink(), slab, lambda _, values: None)
    for number in range(20):
        inbox.add(0, random_values(number, PIECE))
    inbox.collect()
    inbox.close()
    assert slab.peak_bytes <= 2 * PIECE * 4
    assert slab.used_bytes == 0


def test_failure_to_store_is_raised_once_by_collect() -> None:
    failure = AioError("full", errno=errno.ENOSPC)

    def store(parameter: int, values: torch.Tensor) -> None:
        if parameter == 1:
            raise failure

    inbox = GradientInbox(HostLink(), Slab(MIB), store)
    for parameter in range(3):
        inbox.add(parameter, random_values(parameter, 10))
    with pytest.raises(AioError) as caught:
        inbox.collect()
    assert caught.value is failure
    inbox.collect()
    inbox.close()


def test_gradient_larger_than_the_inbox_is_refused_at_once() -> None:
    inbox = GradientInbox(HostLink(), Slab(PIECE * 4), lambda _, values: None)
    with pytest.raises(SlabFullError):
        inbox.add(0, random_values(1, 2 * PIECE))
    inbox.collect()
    inbox.close()


class Rig:
    """Two parameters with subgroups of their own on NVMe, updated early, behind a link."""

    def __init__(self, stack: ExitStack, folder: Path, link: Any) -> None:
        self.faults = Faults()
        stack.enter_context(late_engines(0, self.faults))
        specs = specs_of([PIECE, PIECE])
        placement = placement_of(
            pack(specs, PIECE),
            arena_bytes=2 * PIECE * 4,
            inbox_bytes=8 * PIECE * 4,
            gradient_on_nvme=lambda _: False,
        )
        self.state = TieredState(placement, RULE, [folder], link=link, device_bytes=4 * PIECE * 4)
        stack.callback(self.state.close)
        self.plain = Plain(specs)
        fill_both(self.state, self.plain)
        self.state.propose = lambda: Step(updates=self.plain.updates([0, 1]), gradient_scale=1.0)

    def learn(self) -> None:
        """A first step, so that the next ones are predictable."""
        for parameter in range(2):
            add_to_both(self.state, self.plain, parameter, seed=parameter)
        step_both(self.state, self.plain, [0, 1])
        self.state.flush()


@pytest.mark.timeout(60)
def test_flush_waits_for_gradients_that_would_begin_an_early_update(
    tmp_path: Path, stuck: StuckLink
) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, stuck)
        stuck.may_end.set()
        rig.learn()
        stuck.may_end.clear()
        stuck.is_waited_for.clear()
        add_to_both(rig.state, rig.plain, 0, seed=5)
        stuck.is_waited_for.wait()
        collect, drop = rig.state.collect_gradients, rig.state.drop_early

        def collect_when_free() -> None:
            stuck.may_end.set()
            collect()

        def drop_and_let_one_arrive() -> None:
            drop()
            collect_when_free()

        with (
            patch.object(rig.state, "collect_gradients", collect_when_free),
            patch.object(rig.state, "drop_early", drop_and_let_one_arrive),
        ):
            rig.state.flush()
        add_to_both(rig.state, rig.plain, 1, seed=6)
        step_both(rig.state, rig.plain, [0, 1])
        assert_same(rig.state, rig.plain)


def test_second_gradient_on_its_way_undoes_the_early_update_of_the_first(
    tmp_path: Path, stuck: StuckLink
) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, stuck)
        stuck.may_end.set()
        rig.learn()
        stuck.may_end.clear()
        for seed in (5, 6):
            if seed == 6:
                stuck.may_end.set()
            add_to_both(rig.state, rig.plain, 0, seed=seed)
        add_to_both(rig.state, rig.plain, 1, seed=7)
        step_both(rig.state, rig.plain, [0, 1])
        assert_same(rig.state, rig.plain)


def test_gradient_that_could_not_be_stored_is_missing_and_reported(tmp_path: Path) -> None:
    with ExitStack() as stack:
        rig = Rig(stack, tmp_path, HostLink())
        failure = AioError("broken", errno=errno.EIO)
        with patch.object(rig.state.gradients, "add", side_effect=failure):
            rig.state.add_gradient(0, random_values(1, PIECE))
            with pytest.raises(AioError):
                rig.state.step({}, 1.0)
        assert rig.state.gradients.present == frozenset()
        rig.learn()
        assert_same(rig.state, rig.plain)
