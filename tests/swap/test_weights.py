"""The weight cache: what is resident, what is evicted, and who waits for whom."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from aio import AioError
from swap.plan.layout import PIECE, pack
from swap.tiered import TieredState
from swap.tiers import BudgetError
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import (
    RULE,
    TieredRig,
    add_to_both,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    same_bits,
    specs_of,
    step_both,
)

PAGE_BYTES = PIECE * 4
DEVICES: dict[str, Callable[[], Any]] = {
    "early": lambda: SimulatedDevice(eager=True),
    "late": SimulatedDevice,
    "seeded": lambda: SimulatedDevice(5),
}


class Rig(TieredRig):
    """A tiered state of equal parameters, all on NVMe, and its plain twin."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        *,
        num: int = 4,
        pieces: int = 1,
        room: float = 2,
        eager: float = 0.3,
        device: Any = None,
        capacity: int | None = None,
        **homes: Any,
    ) -> None:
        self.num = num
        specs = specs_of([pieces * PIECE] * num)
        layout = pack(specs, (capacity or pieces) * PIECE)
        self.arena_bytes = int(room * pieces * PAGE_BYTES)
        apart: dict[str, Any] = {}
        if device is not None:
            apart = {"inbox_bytes": 4 * pieces * PAGE_BYTES, "device_bytes": self.arena_bytes}
            stack.callback(device.check)
        placement = placement_of(layout, arena_bytes=self.arena_bytes, **apart, **homes)
        super().__init__(stack, folder, placement, device=device)
        self.engine.eager = eager
        fill_both(self.state, self.plain)
        self.weights = self.state.weights

    def use(self, parameter: int) -> None:
        weight = self.weights.acquire([parameter], "use")[0]
        try:
            assert same_bits(weight, self.plain.weight(parameter))
        finally:
            self.weights.release("use")

    def cycle(self) -> None:
        """Forward and backward over all parameters, a gradient for each, and a step."""
        for parameter in range(self.num):
            self.use(parameter)
        for parameter in reversed(range(self.num)):
            self.use(parameter)
            add_to_both(self.state, self.plain, parameter, seed=parameter)
        step_both(self.state, self.plain, range(self.num))

    def check(self) -> None:
        assert_same(self.state, self.plain)
        for parameter in range(self.num):
            self.use(parameter)


Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        stack.enter_context(patch("swap.cache.weight_cache._RELEASE_SECONDS", 0.2))
        yield lambda **options: Rig(stack, tmp_path, **options)


def test_weights_are_read_once_while_they_fit(make: Make) -> None:
    rig = make(room=4)
    for _ in range(3):
        for parameter in range(rig.num):
            rig.use(parameter)
    assert (rig.weights.misses, rig.weights.hits) == (4, 8)


def test_pinned_weights_stay_and_others_make_room(make: Make) -> None:
    rig = make(room=2)
    pinned = rig.weights.acquire([0], "test")[0]
    for parameter in (1, 2, 3, 1, 2, 3):
        rig.use(parameter)
    misses = rig.weights.misses
    assert rig.weights.borrow(0).data_ptr() == pinned.data_ptr()
    assert rig.weights.misses == misses
    rig.weights.release("test")


def test_acquiring_more_than_fits_is_a_budget_error_and_pins_nothing(make: Make) -> None:
    rig = make(room=2)
    with pytest.raises(BudgetError, match="no room for p"):
        rig.weights.acquire([0, 1, 2], "test")
    assert not rig.weights._pins
    for parameter in range(rig.num):
        rig.use(parameter)


@pytest.mark.parametrize("device", matrix(DEVICES, usual=["seeded"]))
def test_weights_from_memory_that_nobody_used_give_their_room_back(make: Make, device: str) -> None:
    """Also those that are on their way to the device when they are dropped."""
    rig = make(num=3, room=1, device=DEVICES[device](), state_on_nvme=lambda _: False)
    for _ in range(2):
        with pytest.raises(BudgetError, match="no room for p"):
            rig.weights.acquire([0, 1], "test")
        rig.use(2)


def test_memory_that_somebody_still_refers_to_is_not_reused(make: Make) -> None:
    rig = make(room=2)
    kept = rig.weights.borrow(0)
    for parameter in (1, 2, 3):
        rig.use(parameter)
    assert same_bits(kept, rig.plain.weight(0))


def test_what_is_used_farthest_in_the_future_is_evicted(make: Make) -> None:
    rig = make(room=3, num=4)
    rig.cycle()
    rig.state.flush()
    rig.weights.drop()
    rig.engine.log.clear()
    for parameter in (0, 1, 2, 3, 3, 2, 1, 0):
        rig.use(parameter)
    # There is room for 3 of 4. Dropping what was used least recently would read 7 times.
    reads = [lane for kind, lane, _ in rig.engine.log if kind == "read"]
    assert len(reads) == 5


def test_schedule_prefetches_what_comes_next(make: Make) -> None:
    rig = make(room=2, eager=1.0)
    rig.cycle()
    rig.state.flush()
    rig.weights.drop()
    rig.use(0)
    misses = rig.weights.misses
    rig.use(1)
    assert rig.weights.misses == misses, "the weights were there before they were asked for"


@pytest.mark.parametrize("device", [None, *DEVICES])
@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
def test_weights_are_those_of_plain_tensors_step_after_step(
    make: Make, device: str | None, eager: float
) -> None:
    rig = make(room=2, eager=eager, device=None if device is None else DEVICES[device](), num=5)
    for _ in range(4):
        rig.cycle()
    rig.check()


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_read_error_is_raised_and_the_next_read_is_right(make: Make, device: str | None) -> None:
    rig = make(device=None if device is None else DEVICES[device]())
    rig.faults.arm("read", errno.EIO)
    with pytest.raises(AioError) as caught:
        rig.weights.acquire([1], "test")
    assert caught.value.errno == errno.EIO
    assert caught.value.filename is not None
    assert caught.value.filename.endswith("state.swap")
    assert not rig.weights._pins
    rig.use(1)


def test_prefetch_reaches_beyond_weights_at_home_which_take_no_room(make: Make) -> None:
    rig = make(num=6, room=2, eager=1.0, state_on_nvme=lambda unit: unit not in (1, 2, 3))
    for parameter in range(rig.num):
        rig.use(parameter)
    rig.weights.end_cycle()
    rig.weights.drop()
    rig.use(0)
    misses = rig.weights.misses
    rig.use(4)
    assert rig.weights.misses == misses, "the weights were there before they were asked for"


@pytest.mark.parametrize("device", [None, *DEVICES])
@pytest.mark.parametrize("after", range(4))
def test_prefetch_that_fails_never_becomes_weights_and_is_nobodys_error(
    make: Make, device: str | None, after: int
) -> None:
    rig = make(room=4, eager=1.0, device=None if device is None else DEVICES[device]())
    rig.cycle()
    rig.state.flush()
    rig.weights.drop()
    rig.faults.arm("read", errno.EIO, after=after)
    raised = []
    for parameter in (0, 1, 2, 3, 3, 2, 1, 0):
        try:
            rig.use(parameter)
        except AioError as error:
            raised.append(error.errno)
            rig.use(parameter)
    assert raised == ([] if after else [errno.EIO])  # the first was asked for


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_prefetch_that_fails_in_the_only_room_there_is_makes_it_free(
    make: Make, device: str | None
) -> None:
    rig = make(room=1, device=None if device is None else DEVICES[device]())
    rig.faults.arm("read", errno.EIO)
    rig.weights._start_early(1)
    rig.use(1)
    assert rig.faults.raised == 1


@pytest.mark.parametrize("device", [None, *DEVICES])
@pytest.mark.parametrize("eager", [0.0, 1.0])
def test_what_was_prefetched_and_not_used_is_right_for_the_update(
    make: Make, device: str | None, eager: float
) -> None:
    rig = make(room=4, eager=eager, device=None if device is None else DEVICES[device]())
    rig.cycle()
    rig.check()
    rig.weights.drop()
    rig.use(0)  # and the plan brings the others
    for parameter in range(rig.num):
        add_to_both(rig.state, rig.plain, parameter, seed=10 + parameter)
    step_both(rig.state, rig.plain, range(rig.num))
    rig.check()


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_reader_does_not_keep_the_update_from_letting_go_of_memory(
    make: Make, device: str | None
) -> None:
    """Both want the arena: the reader waits for what the update is about to drop."""
    rig = make(num=2, room=1, device=None if device is None else DEVICES[device]())
    arena: Any = rig.state.arena
    put, wait_for_release = arena.put, arena.wait_for_release
    is_putting, may_go_on = threading.Event(), threading.Event()

    def put_slowly(entry: Any, start: int, values: torch.Tensor) -> None:
        put(entry, start, values)
        is_putting.set()
        may_go_on.wait()

    def wait_until_dropped(timeout: float) -> bool:
        may_go_on.set()
        return wait_for_release(timeout)

    with (
        patch.object(arena, "put", put_slowly),
        patch.object(arena, "wait_for_release", wait_until_dropped),
    ):
        add_to_both(rig.state, rig.plain, 0, seed=1)
        step_both(rig.state, rig.plain, [0])
        is_putting.wait()
        rig.use(1)
    rig.check()


def test_entry_that_the_update_did_not_complete_makes_room(make: Make) -> None:
    rig = make(num=2, pieces=2, capacity=1, room=2)
    add_to_both(rig.state, rig.plain, 0, seed=1)
    insert = rig.weights.insert

    def insert_first(segment: Any, weight: torch.Tensor) -> None:
        if segment.start == 0:
            insert(segment, weight)

    with patch.object(rig.weights, "insert", insert_first):
        step_both(rig.state, rig.plain, [0])
        rig.state.flush()
    assert rig.weights._entries == {}
    rig.check()


def test_empty_parameters_have_weights(make: Make, tmp_path: Path) -> None:
    specs = specs_of([0, 5, 0])
    layout = pack(specs, PIECE)
    placement = placement_of(layout, arena_bytes=4 * PAGE_BYTES)
    with late_engines(0):
        state = TieredState(placement, RULE, [tmp_path])
    try:
        weights = state.weights.acquire([0, 1, 2], "test")
        assert [weight.numel() for weight in weights] == [0, 5, 0]
    finally:
        state.close()


def test_owner_knows_weights_in_the_arena_and_nothing_else(make: Make) -> None:
    rig = make(room=2)
    weight = rig.weights.acquire([2], "test")[0]
    assert rig.weights.owner(weight.untyped_storage()._cdata) == 2
    assert rig.weights.owner(torch.empty(1).untyped_storage()._cdata) is None
    rig.weights.release("test")
    rig.weights.drop()
    assert rig.weights.owner(weight.untyped_storage()._cdata) is None


def test_owner_knows_weights_that_are_evicted_and_held_until_they_are_updated(make: Make) -> None:
    rig = make(room=2)
    held = rig.weights.borrow(0)
    storage = held.untyped_storage()._cdata
    for parameter in (1, 2, 3):
        rig.use(parameter)
    misses = rig.weights.misses
    assert rig.weights.owner(storage) == 0
    assert rig.weights.misses == misses
    add_to_both(rig.state, rig.plain, 1, seed=1)
    step_both(rig.state, rig.plain, [1])
    assert rig.weights.owner(storage) == 0
    add_to_both(rig.state, rig.plain, 0, seed=0)
    step_both(rig.state, rig.plain, [0])
    assert rig.weights.owner(storage) is None
    del held
    rig.check()


def test_arena_is_empty_when_nobody_holds_anything(make: Make) -> None:
    rig = make(room=4)
    rig.cycle()
    rig.cycle()
    rig.state.flush()
    rig.weights.drop()
    rig.engine.carry_out_all()
    assert rig.state.slabs["arena"].used_bytes == 0
    assert rig.state.slabs["arena"].peak_bytes <= rig.arena_bytes
