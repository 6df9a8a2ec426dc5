"""What the code of a program calls in the midst of an operation of ranks, and damage that is
mended, in tests, run by ``tests.support.ranks``.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import checkpoint
from tests.support.rank_jobs import complaint
from tests.support.rank_managers import Part


class Calling:
    """A source and sink of four int64 that makes a call whenever its bytes are asked for or come;
    what each was told.
    """

    dtype = torch.int64
    shape = (4,)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.told: list[str] = []

    def read(self, start: int, out: memoryview) -> None:
        self.told.append(complaint(self._call))
        out[:] = bytes(len(out))

    def write(self, start: int, data: memoryview) -> None:
        self.told.append(complaint(self._call))


def calls_of_sources_and_sinks(rank: int, folder: Path) -> dict[str, Any]:
    """A sink that is loaded into, on the main thread and on another, and a source that is saved."""
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", coordinator=coordinator)
    manager.save(1, {"w": torch.ones(4, dtype=torch.int64)})
    alone = checkpoint.Manager(folder / "run")
    calls: dict[str, Callable[[], object]] = {
        "latest": manager.latest,
        "save": partial(manager.save, 2, {"step": 2}),
        "of one process": alone.latest,
    }
    told: dict[str, list[str]] = {}
    for name, call in calls.items():
        one = Calling(call)
        manager.load(into={"w": one})
        thread = threading.Thread(target=partial(manager.load, into={"w": one}))
        thread.start()
        thread.join()
        told[f"{name}, sink"] = one.told
    for name, call in calls.items():
        one = Calling(call)
        manager.save(3, {"w": one})
        manager.save_async(4, {"w": one}).result()
        told[f"{name}, source"] = one.told
    assert manager.steps() == [1, 3, 4]
    return told


def damage_mended(rank: int, folder: Path) -> list[list[int]]:
    """What is kept, where rank 1 has read damage of a step: before it, and when a sound copy has
    taken its place; and where rank 0 has, and has read later that it is sound.
    """
    coordinator = checkpoint.GroupCoordinator()
    manager = checkpoint.Manager(folder / "run", keep=2, coordinator=coordinator)

    def save(step: int) -> None:
        manager.save(step, {"part": Part(rank, coordinator.world_size, step)})

    def damage(step: int) -> None:
        (file,) = manager.path(step).rglob("r1-0.safetensors")
        sound = file.read_bytes()
        file.write_bytes(sound[:4096] + b"damage" + sound[4102:])
        assert complaint(partial(checkpoint.load, manager.path(step)))
        file.write_bytes(sound)

    def damaged_by(reader: int, step: int) -> None:
        dist.barrier()
        if rank == reader:
            damage(step)
        dist.barrier()

    save(1)
    save(2)
    damaged_by(1, 2)
    save(3)
    kept = [manager.steps()]
    if rank == 1:
        shutil.copytree(manager.path(2), folder / "copy")
        shutil.move(manager.path(2), folder / "damaged")
        shutil.move(folder / "copy", manager.path(2))
    dist.barrier()
    save(4)
    kept.append(manager.steps())
    damaged_by(0, 4)
    save(5)
    kept.append(manager.steps())
    if rank == 0:
        checkpoint.load(manager.path(4))
    manager.retire()
    dist.barrier()
    return [*kept, manager.steps()]
