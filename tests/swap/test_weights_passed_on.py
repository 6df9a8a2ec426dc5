"""New weights of what is at home in host memory, on their way to a device that is late or fails."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swap.device.interface import Stream
from swap.interruptions.mixture import MixedStateError, Scope
from swap.kernels import copy_values
from swap.plan.layout import PIECE, pack
from swap.storage import blocks
from swap.storage.arrays import Arrays
from swap.update.stages import Step
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.failing import Failing
from tests.support.tiers import (
    RULE,
    TieredRig,
    add_to_both,
    assert_same,
    fill_both,
    placement_of,
    same_bits,
    specs_of,
    step_both,
)

NUM = 4
PAGE = 4 * PIECE


class Noting(SimulatedDevice):
    """Copies up are over when the host has waited for them, and no sooner; notes their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[tuple[int, int, int]] = []

    def is_done(self, event: Any) -> bool:
        if event.stream is Stream.UP:
            return bool(self._host.get(Stream.UP, 0) >= event.clock[Stream.UP])
        return super().is_done(event)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(stream, target, source)
        if stream is Stream.UP:
            first = source.data_ptr()
            self.sources.append((first, first + source.nbytes, self._clocks[stream][stream]))

    def is_copied_still(self, values: torch.Tensor) -> bool:
        first, end = values.data_ptr(), values.data_ptr() + values.nbytes
        is_over = self._host.get(Stream.UP, 0)
        return any(a < end and first < b and at > is_over for a, b, at in self.sources)


def made(
    stack: ExitStack,
    folder: Path,
    device: SimulatedDevice,
    *,
    room: int,
    spared: bool = True,
    is_speculative: bool = True,
    dtype: torch.dtype = torch.float32,
    on_nvme: bool = False,
) -> TieredRig:
    placement = placement_of(
        pack(specs_of([PIECE] * NUM, dtype), PIECE),
        arena_bytes=2 * PAGE,
        inbox_bytes=4 * PAGE,
        device_bytes=room * PAGE,
        state_on_nvme=lambda _: on_nvme,
        gradient_on_nvme=lambda _: False,
        spared=lambda _: spared,
    )
    rig = TieredRig(stack, folder, placement, device=device)
    fill_both(rig.state, rig.plain)
    if is_speculative:
        rig.state.speculation.expect_step = lambda: Step(
            updates=rig.plain.updates(range(NUM)), gradient_scale=1.0
        )
    return rig


def use(rig: TieredRig, parameter: int) -> None:
    (weight,) = rig.state.weights.acquire([parameter], "test")
    assert same_bits(weight, rig.plain.weight(parameter))
    rig.state.weights.release("test")


def passes(rig: TieredRig, number: int) -> None:
    for parameter in range(NUM):
        use(rig, parameter)
    for parameter in reversed(range(NUM)):
        use(rig, parameter)
        add_to_both(rig.state, rig.plain, parameter, seed=10 * number + parameter)


@pytest.mark.parametrize("spared", [True, False])
@pytest.mark.parametrize("is_speculative", [True, False])
def test_weights_at_home_change_when_a_device_has_copied_them(
    stack: ExitStack, tmp_path: Path, is_speculative: bool, spared: bool
) -> None:
    """Also for a pass behind the last gradient, of which no gradient says that it is over."""
    device, found = Noting(), []
    rig = made(stack, tmp_path, device, room=2, spared=spared, is_speculative=is_speculative)
    apply = type(RULE).apply

    def noted_copy(source: torch.Tensor, target: torch.Tensor) -> None:
        found.append(device.is_copied_still(target))
        copy_values(source, target)

    def noted_apply(self: Any, segment: Any, update: Any, components: Any, *rest: Any) -> None:
        found.append(device.is_copied_still(components["weight"]))
        apply(self, segment, update, components, *rest)

    stack.enter_context(patch.object(blocks, "copy_values", noted_copy))
    for number in range(3):
        passes(rig, number)
        for parameter in range(NUM):
            use(rig, parameter)
        with patch.object(type(RULE), "apply", noted_apply):
            rig.state.step(rig.plain.updates(range(NUM)), 1.0)
            rig.state.pipeline.join()
        rig.plain.step(rig.plain.updates(range(NUM)), 1.0)
    assert found
    assert not any(found)
    assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("after", range(1, NUM + 1))
def test_what_a_device_refuses_is_published_once(
    stack: ExitStack, tmp_path: Path, after: int
) -> None:
    """Each parameter is whole, and the error names those that are as before the step."""
    device = Failing()
    rig = made(stack, tmp_path, device, room=NUM, dtype=torch.bfloat16)
    for number in range(2):
        passes(rig, number)
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    passes(rig, 2)
    old = {p: {n: v.clone() for n, v in rig.plain.components[p].items()} for p in range(NUM)}
    device.fail("copy", Stream.UP, after, 1)
    told = ""
    try:
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    except MixedStateError as error:
        told = str(error)
    for parameter, before in old.items():
        is_named = f"p{parameter}" in told.partition(" may be as before")[0]
        wanted = before if is_named else rig.plain.components[parameter]
        for name, values in wanted.items():
            read = torch.empty(values.numel(), dtype=values.dtype)
            rig.state.components.read(parameter, name, 0, read)
            assert same_bits(read, values), (parameter, name, told)


@pytest.mark.parametrize("is_speculative", [True, False])
def test_step_goes_on_where_a_device_cannot_note_what_was_let_go_of(
    stack: ExitStack, tmp_path: Path, is_speculative: bool
) -> None:
    rig = made(stack, tmp_path, SimulatedDevice(), room=NUM, is_speculative=is_speculative)
    begin = rig.state.weights.begin_update
    arena: Any = rig.state.weights.arena

    def failing(*arguments: Any) -> None:
        with patch.object(arena._memory, "collect", side_effect=RuntimeError("it failed")):
            begin(*arguments)

    for number in range(2):
        passes(rig, number)
        with patch.object(rig.state.weights, "begin_update", failing):
            step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("stream", [Stream.UP, Stream.BACK])
@pytest.mark.parametrize("times", [2, 1 << 30])
@pytest.mark.parametrize("is_speculative", [True, False])
def test_step_on_a_device_that_goes_on_failing_ends(
    stack: ExitStack, tmp_path: Path, is_speculative: bool, times: int, stream: Stream
) -> None:
    """By an error, or as it should: nobody waits for a thread that an error has ended."""
    device = Failing()
    rig = made(stack, tmp_path, device, room=NUM, is_speculative=is_speculative, on_nvme=True)
    for number in range(2):
        passes(rig, number)
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    passes(rig, 2)
    device.fail("wait", stream, 1, times)
    errors: list[BaseException] = []

    def step() -> None:
        for call in (lambda: step_both(rig.state, rig.plain, range(NUM)), rig.state.flush) * 2:
            try:
                call()
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    device.fail("", stream, 0, 0)
    if not errors:
        assert_same(rig.state, rig.plain)


@pytest.mark.parametrize("call", ["copy", "record"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_weights_whose_copy_was_stopped_are_copied_again(
    stack: ExitStack,
    tmp_path: Path,
    call: str,
    error: type[BaseException],
    is_dropped: bool,
) -> None:
    """What a stopped copy comes from stays until the device is past it."""
    device = SimulatedDevice()
    rig = made(stack, tmp_path, device, room=NUM, on_nvme=True)
    with patch.object(device, call, side_effect=error("it failed")), pytest.raises(error):
        rig.state.weights.acquire([0], "test")
    if is_dropped:
        rig.state.weights.drop()
    for number in range(2):
        passes(rig, number)
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    device.check()
    assert_same(rig.state, rig.plain)


def test_values_are_set_at_home_when_a_device_has_copied_those_before(
    stack: ExitStack, tmp_path: Path
) -> None:
    """As a load does while a device is behind with a pass."""
    device, found = Noting(), []
    rig = made(stack, tmp_path, device, room=NUM)
    write = Arrays.write

    def noted(self: Arrays, subgroup: int, name: str, first: int, values: torch.Tensor) -> None:
        found.append(device.is_copied_still(self.of(subgroup, name)))
        write(self, subgroup, name, first, values)

    for parameter in range(NUM):
        use(rig, parameter)
    with patch.object(Arrays, "write", noted):
        fill_both(rig.state, rig.plain, 1)
    assert found
    assert not any(found)
    for parameter in range(NUM):
        use(rig, parameter)


class Silent(Failing):
    """Tells nothing of the end of what it fails to wait for."""

    def is_done(self, event: Any) -> bool:
        if self.calls and event.stream is self.stream:
            raise RuntimeError("the device failed")
        return super().is_done(event)


def begin_training(rig: TieredRig) -> None:
    for number in range(2):
        passes(rig, number)
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.flush()
    passes(rig, 2)


def go_on_from_other_values(rig: TieredRig) -> None:
    state, plain, everything = rig.state, rig.plain, frozenset(range(NUM))
    with state.mixture.changing("a load") as change:
        state.discard_step()
        change.begin(Scope(everything, everything))
        fill_both(state, plain, 1)
        for name in ("exp_avg", "exp_avg_sq"):
            state.components.zero(name)
            for components in plain.components:
                components[name].zero_()
    for number in range(3, 5):
        passes(rig, number)
        step_both(state, plain, everything)
    assert_same(state, plain)


def test_old_weights_come_from_a_device_while_the_rest_is_read(
    stack: ExitStack, tmp_path: Path
) -> None:
    """Disks do not stand still for a copy that waits behind what the device computes."""
    log: list[str] = []

    class Waited(SimulatedDevice):
        def wait(self, event: Any) -> None:
            if event.stream is Stream.BACK:
                log.append("waited")
            super().wait(event)

        def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
            if stream is Stream.BACK:
                log.append("copied")
            super().copy(stream, target, source)

    rig = made(stack, tmp_path, Waited(), room=NUM, is_speculative=False, on_nvme=True)
    begin = rig.state.stages._begin_runs

    def noted(staged: Any, reads: Any, *rest: Any) -> None:
        if reads is staged.reads:
            log.append("read")
        begin(staged, reads, *rest)

    stack.enter_context(patch.object(rig.state.stages, "_begin_runs", noted))
    passes(rig, 0)
    step_both(rig.state, rig.plain, range(NUM))
    assert_same(rig.state, rig.plain)
    assert log[:2] == ["copied", "read"]
    assert "waited" in log


@pytest.mark.parametrize("make", [Failing, Silent])
def test_training_goes_on_from_other_values_on_a_device_that_works_again(
    stack: ExitStack, tmp_path: Path, make: type[Failing]
) -> None:
    """What it would not let go of is there again."""
    device = make()
    rig = made(stack, tmp_path, device, room=NUM, on_nvme=True)
    begin_training(rig)
    device.fail("wait", Stream.BACK, 1, 1 << 30)
    step_both(rig.state, rig.plain, range(NUM))
    with pytest.raises(MixedStateError):
        rig.state.flush()
    device.fail("", Stream.UP, 0, 0)
    go_on_from_other_values(rig)


@pytest.mark.parametrize("call", ["copy", "record"])
def test_slot_that_a_device_has_begun_to_copy_to_is_nobodys_until_it_has_ended(
    stack: ExitStack, tmp_path: Path, call: str
) -> None:
    """Also where the error comes behind the beginning of the copy."""
    device = SimulatedDevice()
    rig = made(stack, tmp_path, device, room=NUM, is_speculative=False, on_nvme=True)
    arena: Any = rig.state.weights.arena
    read_back, do = arena.read_back, getattr(device, call)

    def fail_behind(*arguments: Any) -> None:
        do(*arguments)
        raise RuntimeError("the device failed")

    def failing(*arguments: Any) -> Any:
        with patch.object(device, call, fail_behind):
            return read_back(*arguments)

    begin_training(rig)
    with patch.object(arena, "read_back", failing):
        step_both(rig.state, rig.plain, range(NUM))
        rig.state.pipeline.join()
    go_on_from_other_values(rig)
    device.check()
