"""Saves of several ranks through torch.distributed.checkpoint; run by ``tests.support.ranks``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from tests.support.rank_jobs import complaint


def save_replicated(rank: int, folder: Path) -> list[str]:
    """Every rank has the one tensor; DCP has one of them write it. The files on disk."""
    dcp_save({"w": torch.arange(9.0)}, storage_writer=checkpoint.dcp.StorageWriter(folder / "step"))
    return sorted(file.name for file in (folder / "step").rglob("*.safetensors"))


def save_after_damage(rank: int, folder: Path, keeps_plans: bool) -> list[list[int]]:
    """What `retire` keeps of steps saved by DCP: rank 1 alone has read damage of one, and then that
    it was mended. Then both have read damage of one, and rank 0 alone that it was mended.
    """
    manager = checkpoint.Manager(folder / "run", keep=2)

    def save(step: int) -> list[int]:
        writer = checkpoint.dcp.StorageWriter(manager.path(step))
        planner = DefaultSavePlanner(enable_plan_caching=keeps_plans)
        values = {name: torch.full((9000,), step) for name in ("v", "w")}
        dcp_save(values, storage_writer=writer, planner=planner)
        return retired()

    def retired() -> list[int]:
        if not rank:
            manager.retire()
        dist.barrier()
        steps = manager.steps()
        dist.barrier()
        return steps

    def damaged(step: int, readers: set[int]) -> Callable[[], None]:
        file = min(manager.path(step).rglob("*.safetensors"))
        sound = file.read_bytes()
        dist.barrier()
        if not rank:
            file.write_bytes(sound[:4096] + b"damage" + sound[4102:])
        dist.barrier()
        if rank in readers:
            assert complaint(partial(checkpoint.load, manager.path(step)))
        dist.barrier()
        if not rank:
            file.write_bytes(sound)
        dist.barrier()
        return lambda: checkpoint.load(manager.path(step))

    kept = [save(step) for step in (1, 2)]
    read = damaged(2, {1})
    kept.append(save(3))
    if rank == 1:
        read()
    kept.append(save(4))
    read = damaged(4, {0, 1})
    kept.append(save(5))
    if rank == 0:
        read()
    kept.append(retired())
    return kept
