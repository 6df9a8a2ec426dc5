"""Saves that fail on one rank in tests, at each of their stages; run by ``tests.support.ranks``."""

from __future__ import annotations

import errno
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

import checkpoint
import infinity
from aio import AioError
from checkpoint.ranks import group
from checkpoint.sheltered import Cancellation
from infinity.autograd.residency import ModuleResidency
from swap.tiered import TieredState
from tests.support.keyboard import Keyboard, keyboard_of
from tests.support.models import Stack, vector_loss
from tests.support.rank_jobs import complaint, stack, world
from tests.support.rank_managers import Part

_NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "the disk of this rank")
_FAILING: dict[str, tuple[str, BaseException]] = {
    "plan": ("checkpoint.saving.rank_plan.plan_part_files", ValueError("the header is too long")),
    "engine": ("checkpoint.saving.running.Engine", OSError(errno.EAGAIN, "no more requests")),
    "memory": ("checkpoint.transfer.memory.KeptMemory.take", MemoryError("for the copy")),
    "thread": ("checkpoint.sheltered.start_apart", RuntimeError("can't start new thread")),
    "copy": ("checkpoint.transfer.snapshot.Workers", RuntimeError("no more threads")),
    "staging": ("checkpoint.saving.commit.filling_supplies", MemoryError("for the buffers")),
    "write": ("checkpoint.saving.data_files.RankFiles.write", _NO_SPACE),
}
"""What fails at a stage, and of what."""


class _Unhooked(torch.optim.SGD):
    """A guard that cannot wait."""

    register_step_pre_hook = None  # type: ignore[assignment]


def background_failures(rank: int, folder: Path) -> dict[str, list[str]]:
    """For each stage at which a background save fails on rank 1: where this rank is told, and what.
    A save between any two of them succeeds.
    """
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    odd = rank == 1
    weight = torch.nn.Parameter(torch.ones(5000))
    guard = torch.optim.SGD([weight])

    def save(stage: str, leaf: object = 1, guard: Any = None) -> list[str]:
        tree = {"x": weight, "leaf": leaf}
        try:
            with _failing(stage) if odd else nullcontext():
                pending = checkpoint.save_async(
                    tree, folder / "step", guard=guard, coordinator=coordinator
                )
                pending.wait_done()
        except Exception as error:
            return ["call", f"{type(error).__name__}: {error}"]
        return ["result", complaint(pending.result)]

    told = {"nothing": save("")}
    for stage in _FAILING:
        told[stage] = save(stage, guard=guard if stage == "staging" else None)
        told[f"after {stage}"] = save("")
    told["leaf"] = save("", leaf=object() if odd else 1)
    told["guard"] = save("", guard=_Unhooked([weight]) if odd else guard)
    told["after all"] = save("")
    return told


def _failing(stage: str) -> AbstractContextManager[Any]:
    if not stage:
        return nullcontext()
    target, error = _FAILING[stage]
    return mock.patch(target, side_effect=error)


def differing_calls(rank: int, folder: Path) -> dict[str, str]:
    """What each rank is told where rank 1 is given something else, or rank 0 cannot look."""
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    stripe = folder / "stripe"
    stripe.mkdir(exist_ok=True)
    odd = rank == 1

    def save(stripes: list[Path] | None) -> None:
        checkpoint.save({"x": torch.ones(9)}, folder / "step", stripes, coordinator=coordinator)

    manager.save(1, {"x": 1})
    told = {
        "stripes on 1": complaint(lambda: save([stripe] if odd else None)),
        "stripes on 0": complaint(lambda: save(None if odd else [stripe])),
    }
    unreadable = OSError(errno.EIO, "Input/output error", "a manifest")
    looking = mock.patch("checkpoint.saving.api.time_of_save", side_effect=unreadable)
    with nullcontext() if odd else looking:
        told["order"] = complaint(lambda: manager.save(2, {"x": 2}))
        told["order, behind"] = complaint(lambda: manager.save_async(2, {"x": 2}))
    manager.save(2, {"x": 2})
    none_such: Any = "3"
    told["step"] = complaint(lambda: manager.save(none_such if odd else 3, {"x": 3}))
    told["step, behind"] = complaint(lambda: manager.save_async(-1 if odd else 3, {"x": 3}))
    told["load"] = complaint(lambda: manager.load(none_such if odd else 2))
    place: Any = 7 if odd else folder / "step"
    told["path"] = complaint(lambda: checkpoint.save({}, place, coordinator=coordinator))
    few: dict[str, Any] = {"staging_bytes": "1GiB" if odd else 1 << 20, "coordinator": coordinator}
    told["staging"] = complaint(lambda: checkpoint.save({}, folder / "step", **few))
    told["staging, behind"] = complaint(lambda: checkpoint.save_async({}, folder / "step", **few))
    told["steps"] = str(manager.steps())
    return told


def interrupted_saves(rank: int, folder: Path) -> dict[str, str]:
    """What each rank is told where a Ctrl-C meets rank 1 before its part of a save begins."""
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    told = {}
    for number, (name, target) in enumerate(_BEFORE_A_SAVE.items()):
        manager.save_async(2 * number, {"x": 1})
        with mock.patch(target, side_effect=KeyboardInterrupt) if rank == 1 else nullcontext():
            try:
                told[name] = complaint(partial(manager.save, 2 * number + 1, {"x": 1}))
            except KeyboardInterrupt:
                told[name] = "interrupted"
        told[f"after {name}"] = complaint(partial(manager.save, 2 * number + 1, {"x": 1}))
    return told


_BEFORE_A_SAVE = {
    "settling": "checkpoint.saving.pending.PendingSave.wait_done",
    "starting": "checkpoint.saving.running.wait_for",
}


def interrupted_blocks(rank: int, folder: Path) -> list[str]:
    """What each rank is told where a Ctrl-C meets rank 1 as its block begins, and of blocks of the
    same group behind that.
    """
    agreed = checkpoint.GroupCoordinator._agreed

    def met(self: checkpoint.GroupCoordinator, *arguments: Any) -> Any:
        found = agreed(self, *arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    def enter() -> None:
        with infinity.offload(Stack(), folder, host_memory="256MiB", process_group=world()):
            pass

    told = []
    for is_cut in (rank == 1, False, False):
        way = mock.patch.object(checkpoint.GroupCoordinator, "_agreed", met)
        try:
            with way if is_cut else nullcontext():
                told.append(complaint(enter))
        except KeyboardInterrupt:
            told.append("interrupted")
    return told


def interrupted_beginnings(rank: int, folder: Path) -> list[str]:
    """What each rank is told where a Ctrl-C meets rank 1 as its model becomes an offloaded one,
    while rank 0 has begun to train; and of the next block.
    """
    attach = ModuleResidency.attach

    def met(self: ModuleResidency, model: nn.Module) -> None:
        attach(self, model)
        signal.raise_signal(signal.SIGINT)

    def train() -> None:
        model = stack()
        with infinity.offload(model, folder, host_memory="256MiB", process_group=world()) as block:
            vector_loss(model, rank).backward()
            block.step()

    told = []
    for is_cut in (rank == 1, False):
        way = mock.patch.object(ModuleResidency, "attach", met)
        try:
            with way if is_cut else nullcontext():
                told.append(complaint(train))
        except KeyboardInterrupt:
            told.append("interrupted")
    return told


def interrupted_transfers(rank: int, folder: Path) -> dict[str, str]:
    """What each rank is told where a Ctrl-C meets rank 1 while its bytes are on their way: what
    fails of that is the thread that moves them, which was not interrupted itself.
    """
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    plain = {"w": Part(rank, coordinator.world_size, 1)}
    manager.save(1, plain)
    told = {}
    with keyboard_of(signal.SIGINT) as keyboard:
        tree = {"w": _Interrupted(rank, coordinator.world_size, keyboard) if rank else plain["w"]}
        for name, call in {
            "save": partial(checkpoint.save, tree, folder / "step", coordinator=coordinator),
            "Manager.save": partial(manager.save, 2, tree),
            "Manager.load": partial(manager.load, 1, into=tree),
        }.items():
            try:
                told[name] = complaint(call)
            except KeyboardInterrupt:
                told[name] = "interrupted"
    manager.save(3, plain)
    return told


class _Interrupted(Part):
    """The part of a rank whose main thread is interrupted when it is read or written: the transfer
    goes on when it has been asked to stop.
    """

    def __init__(self, rank: int, world_size: int, keyboard: Keyboard) -> None:
        super().__init__(rank, world_size, 1)
        self._keyboard = keyboard

    def read(self, start: int, out: memoryview) -> None:
        self._interrupt()
        super().read(start, out)

    def write(self, start: int, data: memoryview) -> None:
        self._interrupt()
        super().write(start, data)

    def _interrupt(self) -> None:
        is_asked, request = threading.Event(), Cancellation.request

        def noted(*arguments: Any) -> None:
            request(*arguments)
            is_asked.set()

        with mock.patch.object(Cancellation, "request", noted):
            self._keyboard.press()
            assert is_asked.wait(10)


def failures_elsewhere(rank: int, folder: Path) -> list[str]:
    """What each rank is told where what rank 0 saves comes from ranks that failed it."""
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    tree = {"x": _FromOthers(rank == 0)}
    told = [complaint(lambda: checkpoint.save(tree, folder / "step", coordinator=coordinator))]
    tree["x"].fails = False
    told.append(complaint(lambda: checkpoint.save(tree, folder / "step", coordinator=coordinator)))
    return told


class _FromOthers:
    """Bytes that another group of ranks has."""

    dtype = torch.uint8
    shape = (9000,)

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def read(self, start: int, out: memoryview) -> None:
        if self.fails:
            raise checkpoint.RankFailedError("rank 7 of another group failed", rank=7)
        out[:] = bytes(len(out))


def other_operations(rank: int, folder: Path) -> list[str]:
    """What each rank is told where rank 1 calls something else, as after an interrupt."""
    told = []
    for other in ("steps", "latest", "load"):
        coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
        manager = checkpoint.Manager(folder / other, coordinator=coordinator)
        manager.save(1, {"x": 1})
        told.append(
            complaint(getattr(manager, other) if rank == 1 else partial(manager.save, 2, {}))
        )
    return told


def errors_of_handlers(rank: int, folder: Path) -> str:
    """What a rank is told whose handler raises while it waits for the other one, and that one."""
    coordinator = checkpoint.GroupCoordinator(timeout_seconds=10)
    if rank == 1:
        time.sleep(1)
        return complaint(lambda: coordinator.meet(1, 1))

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("of the handler")

    signal.signal(signal.SIGALRM, refuse)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return complaint(lambda: coordinator.meet(1, 1))


def unfinished_steps(rank: int, folder: Path) -> dict[str, list[str]]:
    """What each call says where rank 0 cannot finish the last step, and then when it can."""
    told: dict[str, list[str]] = {}
    flush, failing = TieredState.flush, [False]

    def flushed(state: TieredState) -> None:
        if failing[0]:
            failing[0] = False
            raise AioError("no space", errno=errno.ENOSPC, filename="state.swap")
        flush(state)

    with (
        mock.patch.object(TieredState, "flush", flushed),
        infinity.offload(Stack(), folder, host_memory="256MiB", process_group=world()) as offloaded,
    ):
        calls = {
            "save": partial(offloaded.save, folder / "saved"),
            "export": partial(offloaded.export, folder / "exported"),
        }
        for name, call in calls.items():
            failing[0] = rank == 0
            told[name] = [complaint(call), complaint(call)]
    return told


def steps_not_forgotten(rank: int, folder: Path) -> list[str]:
    """What loads say that rank 0 cannot finish, then cannot begin, and then can; and a save."""
    stopped = (
        nullcontext() if rank else _stopped("infinity.values.loading.restore_scalars", OSError)
    )
    kept = nullcontext() if rank else _stopped("swap.tiered.TieredState.discard_step", MemoryError)
    with infinity.offload(
        Stack(), folder, host_memory="256MiB", process_group=world()
    ) as offloaded:
        offloaded.save(folder / "saved")
        load = partial(offloaded.load, folder / "saved")
        with stopped:
            told = [complaint(load)]
        with kept:
            told.append(complaint(load))
        return [*told, complaint(load), complaint(partial(offloaded.save, folder / "saved"))]


def _stopped(target: str, error: type[Exception]) -> AbstractContextManager[Any]:
    return mock.patch(target, side_effect=error("of this rank"))


def missed_meetings(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 stays away, as one that was interrupted before it came, until the others have given it
    up, one after the other; then all come.
    """
    told = {"missing": "", "block": ""}
    seconds = 1 + rank / 4
    if rank != 1:
        told["missing"] = complaint(lambda: checkpoint.GroupCoordinator(timeout_seconds=seconds))
        with mock.patch.object(group, "_timeout_of", return_value=timedelta(seconds=seconds)):
            told["block"] = complaint(lambda: _begin_and_end(folder))
    torch.distributed.barrier()
    told["coordinator"] = complaint(lambda: checkpoint.GroupCoordinator().exchange(rank))
    told["next block"] = complaint(lambda: _begin_and_end(folder))
    return told


def _begin_and_end(folder: Path) -> None:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    with infinity.offload(model, folder, host_memory="64MiB", process_group=world()):
        pass
