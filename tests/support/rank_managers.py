"""What single ranks do with a `checkpoint.Manager` in tests, run by ``tests.support.ranks``."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import checkpoint
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.records import Manifest
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.verdicts import LoadedStep
from tests.support.interrupts import interrupt, sampled
from tests.support.rank_jobs import complaint

NUMEL = 100_000
_FIRST_LINES = 8
"""Of a call of ours: before its guard a rank has not come yet, and does not say so."""


def _damage(saved: Path, name: str) -> None:
    """Of the data file of that name."""
    (file,) = saved.rglob(name)
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"damage")


class Part:
    """The part that a rank has of a row of int64: what it saves, and what it loads."""

    dtype = torch.int64
    shape = (NUMEL,)

    def __init__(self, rank: int, world_size: int, value: int) -> None:
        bounds = [NUMEL * k // world_size for k in range(world_size + 1)]
        self.first, end = bounds[rank : rank + 2]
        self.ranges = ((self.first, end - self.first),)
        self.values = torch.full((end - self.first,), value)

    def read(self, start: int, out: memoryview) -> None:
        first = start // 8 - self.first
        count = len(out) // 8
        torch.frombuffer(out, dtype=torch.int64).copy_(self.values[first : first + count])

    def write(self, start: int, data: memoryview) -> None:
        given = torch.frombuffer(data, dtype=torch.int64)
        low = max(start // 8, self.first)
        high = min(start // 8 + len(given), self.first + len(self.values))
        if low < high:
            at = low - start // 8
            self.values[low - self.first : high - self.first] = given[at : at + high - low]


class Room(NamedTuple):
    f_bavail: int
    f_frsize: int
    f_blocks: int


def series(rank: int, folder: Path) -> dict[str, Any]:
    """A run's checkpoints over ranks; what each rank is told."""
    told: dict[str, Any] = {}
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", keep=2, keep_every=4, coordinator=coordinator)

    def state(value: int) -> dict[str, Any]:
        part = Part(rank, coordinator.world_size, value)
        return {"part": part, "same": torch.full((9000,), float(value)), "step": value}

    def loaded(**options: Any) -> int:
        """The step that was loaded, after looking at its values."""
        into = {"part": Part(rank, coordinator.world_size, -1), "step": 0}
        found = manager.load(into=into, **options)
        assert bool((into["part"].values == found["step"]).all())  # type: ignore[attr-defined]
        return int(found["step"])

    told["empty"] = [manager.latest(), manager.steps(), complaint(manager.load)]
    for step in range(1, 7):
        if step % 2:
            manager.save(step, state(step))
            continue
        tree = state(step)
        pending = manager.save_async(step, tree)
        tree["same"].zero_()
        tree["part"].values.zero_()
        if step != 4:  # the next save waits for that one
            pending.result()
    told["steps"] = manager.steps()
    told["whole"] = bool((checkpoint.load(manager.path(6))["part"] == 6).all())
    told["latest"] = [manager.latest(), loaded(), loaded(step=4)]
    told["missing"] = complaint(lambda: loaded(step=3))

    # What one rank does not find whole counts for none.
    if rank == 0:
        _damage(manager.path(6), "r1-0.safetensors")
    dist.barrier()
    told["damaged"] = [manager.latest(), loaded(), complaint(lambda: loaded(step=6))]
    with _unreadable(manager.path(6), manager.path(5)) if rank == 1 else _as_it_is():
        told["unseen"] = [manager.latest(), manager.steps()]

    # Ranks that differ, and one without room.
    told["other step"] = complaint(lambda: manager.save(10 + rank, state(10)))
    with _small_disk() if rank == 1 else _as_it_is():
        told["room"] = complaint(lambda: manager.save(7, state(7)))
        told["room, behind"] = complaint(lambda: manager.save_async(7, state(7)).result())
        unasked = manager.save_async(7, state(7))
        unasked.wait_done()
    if rank == 0:
        told["unasked"] = complaint(unasked.result)
    told["next"] = complaint(lambda: manager.save(7, state(7)))
    told["other load"] = complaint(lambda: loaded(step=4 + rank))
    told["after"] = manager.steps()
    manager.save(8, state(8))
    told["end"] = manager.steps()
    dist.barrier()
    told["folders"] = sorted(entry.name for entry in (folder / "run").iterdir())
    return told


def damage_by_number(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 reads damage of a step that is loaded by its number; what is kept then."""
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", keep=2, coordinator=coordinator)
    for step in (1, 2):
        manager.save(step, {"part": Part(rank, coordinator.world_size, step)})
    if rank == 0:
        _damage(manager.path(2), "r1-0.safetensors")
    dist.barrier()
    into = {"part": Part(rank, coordinator.world_size, -1)}
    told: dict[str, Any] = {"load": complaint(lambda: manager.load(2, into=into))}
    manager.save(3, {"part": Part(rank, coordinator.world_size, 3)})
    return {**told, "kept": manager.steps()}


def left_behind(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 reads damage of the newest of more steps than are kept, and there is no room."""
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", keep=1, coordinator=coordinator)
    if rank == 0:
        for step in (1, 2, 3):
            checkpoint.save({"w": torch.full((9000,), step)}, manager.path(step))
        _damage(manager.path(3), "r0-0.safetensors")
    dist.barrier()
    told: dict[str, Any] = {
        "read": complaint(lambda: checkpoint.load(manager.path(3))) if rank else ""
    }
    for turn in ("first", "second"):
        with _small_disk():
            told[turn] = complaint(lambda: manager.save(4, {"w": torch.zeros(9000)}))
        dist.barrier()  # what a failed save made is removed by one of them
        told[f"{turn} left"] = sorted(path.name for path in manager.root.iterdir())
        dist.barrier()
    manager.save(4, {"w": torch.full((9000,), 4)})
    return {
        **told,
        "kept": manager.steps(),
        "left": sorted(path.name for path in manager.root.iterdir()),
    }


def damage_apart(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 alone reads damage of a step, and later that it is sound; what is kept meanwhile."""
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", keep=2, coordinator=coordinator)

    def save(step: int) -> list[int]:
        manager.save(step, {"part": Part(rank, coordinator.world_size, step)})
        return manager.steps()

    kept = [save(step) for step in (1, 2)]
    (file,) = manager.path(2).rglob("r1-0.safetensors")
    sound = file.read_bytes()
    dist.barrier()
    told = ""
    if rank == 1:
        file.write_bytes(sound[:4096] + b"damage" + sound[4102:])
        told = complaint(partial(checkpoint.load, manager.path(2)))
    kept.append(save(3))
    if rank == 1:
        file.write_bytes(sound)
        checkpoint.load(manager.path(2))
    kept.append(save(4))
    return {"load": told, "kept": kept}


def values_of_a_step_passed_over(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 0 reads damage of a step that rank 1 has loaded all of, into trees that may lack some:
    the step before has neither `new` nor the second one of the pair.
    """
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    part = Part(rank, coordinator.world_size, -1)
    manager.save(1, {"part": part, "both": 1, "pair": (1,)})
    manager.save(2, {"part": part, "both": 2, "pair": (2, 2), "new": 2})
    if rank == 0:
        _damage(manager.path(2), "r0-0.safetensors")
    dist.barrier()
    given: dict[str, dict[str, Any]] = {
        "new": {"part": part, "new": 0},
        "both": {"part": part, "both": 0},
        "pair": {"part": part, "pair": (0, 0)},
    }
    told = {
        name: complaint(partial(manager.load, into=into, strict=False))
        for name, into in given.items()
    }
    return {**told, "loaded": [given["both"]["both"], manager.loaded == LoadedStep(1, (2,))]}


def calls_in_handlers(rank: int, folder: Path) -> dict[str, Any]:
    """The handler of a signal calls a manager while that, or another one of these ranks, loads."""
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    for step in (1, 2):
        manager.save(step, {"step": step})
    dist.barrier()
    (manager.path(2) / "manifest.json").write_bytes(b"damage")
    calls: dict[str, Callable[[], object]] = {
        "save": partial(manager.save, 3, {"step": 3}),
        "save behind": partial(manager.save_async, 3, {"step": 3}),
        "latest": manager.latest,
        "steps": manager.steps,
        "load": manager.load,
        "make": partial(checkpoint.Manager, folder / "other", coordinator=coordinator),
    }
    told: dict[str, Any] = {}

    class Handler(logging.Handler):
        """Of the log: so the signal comes at the same point on all ranks."""

        def emit(self, record: logging.LogRecord) -> None:
            signal.raise_signal(signal.SIGUSR1)

    handler = Handler()
    for name, call in calls.items():
        heard: list[str] = []
        signal.signal(
            signal.SIGUSR1, lambda *_, call=call, heard=heard: heard.append(complaint(call))
        )
        logging.getLogger("checkpoint").addHandler(handler)
        loaded = manager.load()
        logging.getLogger("checkpoint").removeHandler(handler)
        told[name] = [loaded["step"], sorted(set(heard))]
    signal.signal(signal.SIGUSR1, lambda *_: manager.save(3, {"step": 3}))
    logging.getLogger("checkpoint").addHandler(handler)
    told["unhandled"] = complaint(manager.load)
    logging.getLogger("checkpoint").removeHandler(handler)
    told["after"] = [manager.save(4, {"step": 4}).num_tensors, manager.load()["step"]]
    return told


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _unreadable(*paths: Path) -> Iterator[None]:
    """These checkpoints are damaged as far as this rank can see."""
    check = KnownManifests.check

    def check_some(self: KnownManifests, path: Path) -> Manifest:
        if path in paths:
            raise CorruptCheckpointError("not what this rank sees", path=path)
        return check(self, path)

    logging.getLogger("checkpoint").setLevel(logging.ERROR)
    with mock.patch.object(KnownManifests, "check", check_some):
        yield


def _small_disk() -> Any:
    """A page is free, of some."""
    return mock.patch("os.statvfs", return_value=Room(1, 4096, 99))


def interrupted_looks(
    rank: int, folder: Path, *, wanted: int, seed: int = 0
) -> dict[str, list[str]]:
    """Rank 1 is interrupted at lines of what both do; what each is told, and that all goes on."""
    manager = checkpoint.Manager(folder / "run", coordinator=checkpoint.GroupCoordinator())
    for step in (1, 2):
        manager.save(step, {"w": torch.full((100,), step)})
    told: dict[str, list[str]] = {}
    for name in ("load", "load 1", "latest", "steps"):
        act = _look(manager, name)
        lines = interrupt(act, None).seen if rank else act() and 0
        counts: list[Any] = [None, None]
        dist.all_gather_object(counts, lines)
        told[name] = []
        for number in _points(counts[1], wanted, seed):
            if rank:
                told[name].append(interrupt(act, number).line)
            else:
                told[name].append(complaint(act))
            assert manager.load()["w"][0] == 2
    return told


def _points(total: int, wanted: int, seed: int) -> list[int]:
    return [_FIRST_LINES + n for n in sampled(total - _FIRST_LINES, wanted, seed)]


def _look(manager: checkpoint.Manager, name: str) -> Callable[[], object]:
    looks: dict[str, Callable[[], object]] = {
        "load": manager.load,
        "load 1": lambda: manager.load(step=1),
        "latest": manager.latest,
        "steps": manager.steps,
    }
    return looks[name]


def interrupted_saves(
    rank: int, folder: Path, *, wanted: int, seed: int
) -> dict[str, list[list[str]]]:
    """Rank 1 is interrupted at lines of the main thread in saves; for each point the line, what
    this rank is told, and whether the save is there for both.
    """
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    value = [0]

    def saves() -> dict[str, Callable[[], object]]:
        state, path = {"w": torch.full((100,), value[0])}, folder / "one"
        return {
            "save": lambda: checkpoint.save(state, path, coordinator=coordinator),
            "save_async": lambda: checkpoint.save_async(
                state, path, coordinator=coordinator
            ).result(),
            "Manager.save": lambda: manager.save(7, state),
            "Manager.save_async": lambda: manager.save_async(7, state).result(),
        }

    told: dict[str, list[list[str]]] = {}
    for name in saves():
        path = manager.path(7) if name.startswith("Manager") else folder / "one"
        saves()[name]()  # what comes with the first of its kind
        lines = interrupt(saves()[name], None).seen if rank else saves()[name]() and 0
        counts: list[Any] = [None, None]
        dist.all_gather_object(counts, lines)
        told[name] = []
        for number in _points(counts[1], wanted, seed):
            value[0] += 1
            act, line, heard = saves()[name], "", ""
            if rank:
                line = interrupt(act, number).line
            else:
                heard = complaint(act)
            dist.barrier()
            is_there = int(checkpoint.load(path)["w"][0]) == value[0]
            told[name].append([line, heard, str(is_there)])
            saves()[name]()
    return told


def refused_constructors(rank: int, folder: Path) -> dict[str, str]:
    """Rank 1 gives other arguments; what each is told."""
    told: dict[str, str] = {}
    odd: Any = "odd"

    def coordinator(**options: Any) -> None:
        checkpoint.GroupCoordinator(**options).leave()

    for name, options in {
        "seconds": {"timeout_seconds": odd},
        "no time": {"timeout_seconds": -1},
        "name": {"name": odd},
    }.items():
        told[name] = complaint(partial(coordinator, **(options if rank else {})))
    shared = checkpoint.GroupCoordinator()
    for name, options in {
        "keep": {"keep": odd},
        "engine": {"engine": odd},
        "stripe_dirs": {"stripe_dirs": [7]},
    }.items():
        given: dict[str, Any] = options if rank else {}
        told[name] = complaint(partial(_manager, folder, shared, given))
    told["then"] = complaint(lambda: _manager(folder, shared, {}).save(1, {"w": torch.ones(3)}))
    if not rank:
        told["missing"] = complaint(lambda: coordinator(timeout_seconds=1))
    dist.barrier()
    return told


def _manager(folder: Path, coordinator: Any, options: dict[str, Any]) -> checkpoint.Manager:
    return checkpoint.Manager(folder / "run", coordinator=coordinator, **options)
