"""Room for weights: there is some when so many bytes are free or will be, and none is given up that
comes back by itself.
"""

import errno
import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aio import AioError
from swap.plan.layout import PIECE, pack
from swap.tiers import BudgetError
from tests.support.examples import examples
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import TieredRig, fill_both, placement_of, same_bits, specs_of

PAGE_BYTES = PIECE * 4


@contextmanager
def rig_of(pieces: list[int], room: int, folder: Path, device: Any = None) -> Iterator[TieredRig]:
    """Parameters of so many pieces each, in an arena of ``room`` pieces."""
    layout = pack(specs_of([PIECE * count for count in pieces]), max(pieces) * PIECE)
    nbytes = room * PAGE_BYTES
    apart: dict[str, Any] = {}
    if device is not None:
        apart["inbox_bytes"] = 2 * max(pieces) * PAGE_BYTES
        apart["device_bytes"] = sum(pieces) * PAGE_BYTES
    placement = placement_of(layout, arena_bytes=nbytes, **apart)
    with ExitStack() as stack:
        stack.enter_context(patch("swap.cache.weight_cache._RELEASE_SECONDS", 0.2))
        rig = TieredRig(stack, folder, placement, device=device)
        rig.engine.eager = 0.0
        fill_both(rig.state, rig.plain)
        yield rig


def test_weights_find_room_between_others_that_are_held_wherever_those_lie(tmp_path: Path) -> None:
    """Eight pieces are free, in three parts of which none has four."""
    with rig_of([2, 3, 3, 4, 4], 15, tmp_path) as rig:
        weights, arena = rig.state.weights, rig.state.slabs["arena"]
        held = {index: weights.borrow(index) for index in range(4)}
        del held[0], held[2]
        for _ in range(3):
            held[4] = weights.borrow(4)
            assert all(same_bits(held[index], rig.plain.weight(index)) for index in (1, 3, 4))
            assert arena.used_bytes == 11 * PAGE_BYTES
            del held[4]
            weights.drop()


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_weights_have_room_while_the_bytes_that_are_held_leave_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pieces = data.draw(st.lists(st.integers(1, 7), min_size=4, max_size=8))
    room = data.draw(st.integers(max(pieces) * 2, max(max(pieces) * 2, sum(pieces))))
    with rig_of(pieces, room, tmp_path_factory.mktemp("swap")) as rig:
        held: dict[int, torch.Tensor] = {}
        for _ in range(data.draw(st.integers(1, 20))):
            chosen = data.draw(st.integers(0, len(pieces) - 1))
            for index in data.draw(st.permutations([*held])):
                if sum(pieces[other] for other in {*held, chosen}) > room:
                    held.pop(index)
            weight = rig.state.weights.borrow(chosen)
            assert same_bits(weight, rig.plain.weight(chosen))
            if data.draw(st.booleans()):
                held[chosen] = weight
            del weight
            assert rig.state.slabs["arena"].peak_bytes <= room * PAGE_BYTES


def test_weights_that_are_held_are_there_when_they_are_used_again(tmp_path: Path) -> None:
    with rig_of([2, 2, 2, 2], 5, tmp_path) as rig:
        weights = rig.state.weights
        held = weights.borrow(0)
        for index in (1, 2, 3):
            weights.borrow(index)
        misses = weights.misses
        again = weights.borrow(0)
        assert weights.misses == misses
        assert again.data_ptr() == held.data_ptr()
        del held, again
        for index in (1, 2, 3, 1):
            weights.borrow(index)
        assert rig.state.slabs["arena"].used_bytes <= 4 * PAGE_BYTES


def test_weights_that_a_cycle_of_garbage_holds_make_room(tmp_path: Path) -> None:
    with rig_of([1, 1], 1, tmp_path) as rig:
        gc.collect()
        gc.disable()
        try:
            cycle: list[Any] = [rig.state.weights.borrow(0)]
            cycle.append(cycle)
            with pytest.raises(BudgetError):
                rig.state.weights.borrow(1)
            del cycle
            assert same_bits(rig.state.weights.borrow(1), rig.plain.weight(1))
        finally:
            gc.enable()


def test_weights_that_a_thread_at_work_holds_are_waited_for(tmp_path: Path) -> None:
    """However long that is in seconds: here more than what holds them otherwise is given."""
    with rig_of([1, 1], 1, tmp_path) as rig:
        weights, arena = rig.state.weights, rig.state.arena
        assert arena is not None
        wait_for_release, looks = arena.wait_for_release, 0

        def elsewhere(work: Any) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        def look(timeout: float) -> bool:
            nonlocal looks
            looks += 1
            if looks == 60:
                elsewhere(lambda: weights.release("other"))
            return wait_for_release(timeout)

        elsewhere(lambda: weights.acquire([0], "other"))
        with patch.object(arena, "wait_for_release", look):
            weights.acquire([1], "own")
            assert looks == 60
            weights.release("own")
            weights.acquire([0], "own")
            with pytest.raises(BudgetError):  # nobody else is there who would let go
                weights.borrow(1)
        assert looks < 120


def test_what_an_update_copies_is_waited_for(tmp_path: Path) -> None:
    with rig_of([1, 1], 1, tmp_path) as rig:
        weights, arena = rig.state.weights, rig.state.arena
        assert arena is not None
        weights.borrow(0)
        segment = rig.state.layout.segments_of[0][0]
        is_copying, may_end = threading.Event(), threading.Event()
        wait_for_release, looks = arena.wait_for_release, 0

        read_back = arena.read_back

        def read_back_late(*given: Any) -> Any:
            is_copying.set()
            may_end.wait()
            return read_back(*given)

        def look(timeout: float) -> bool:
            nonlocal looks
            looks += 1
            if looks == 60:
                may_end.set()
                copying.join()
            return wait_for_release(timeout)

        out = torch.empty(PIECE)
        copying = threading.Thread(target=lambda: weights.take_old(segment, out, []))
        with patch.object(arena, "wait_for_release", look):
            with patch.object(arena, "read_back", read_back_late):
                copying.start()
                is_copying.wait()
            try:
                assert same_bits(weights.borrow(1), rig.plain.weight(1))
            finally:
                may_end.set()
                copying.join()
        assert same_bits(out, rig.plain.weight(0))


@pytest.mark.parametrize("eager", [True, False])
def test_weights_that_land_together_make_room_for_one_another(eager: bool, tmp_path: Path) -> None:
    """Of nine pieces to land in five are free, in two parts of which none has four."""
    with rig_of([3, 2, 2, 4, 2], 9, tmp_path, SimulatedDevice(eager=eager)) as rig:
        weights = rig.state.weights
        for index in (0, 1, 2, 4):
            weights._start_early(index)
        weights._cached.entries.pop(0).operations[0].result()
        weights._cached.entries.pop(2).operations[0].result()
        found = weights.acquire([3, 1, 4], "use")
        for index, weight in zip((3, 1, 4), found, strict=True):
            assert same_bits(weight, rig.plain.weight(index))


def test_weights_that_cannot_land_raise_the_error_of_the_disk_when_they_are_asked_for(
    tmp_path: Path,
) -> None:
    with rig_of([3, 2, 2, 4, 2], 9, tmp_path, SimulatedDevice(eager=True)) as rig:
        weights = rig.state.weights
        for index in (0, 1, 2, 4):
            if index == 4:
                rig.faults.arm("read", errno.EIO, times=2)
            weights._start_early(index)
        weights._cached.entries.pop(0).operations[0].result()
        weights._cached.entries.pop(2).operations[0].result()
        rig.faults.disarm()
        rig.faults.arm("read", errno.EIO, after=1)
        with pytest.raises(AioError):
            weights.acquire([3, 4], "use")
        rig.faults.disarm()
        assert same_bits(weights.acquire([3, 4], "use")[1], rig.plain.weight(4))
