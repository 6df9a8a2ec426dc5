"""Saves of several ranks through torch.distributed.checkpoint; run by ``tests.support.ranks``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from tests.support.rank_jobs import complaint


def save_replicated(rank: int, folder: Path) -> list[str]:
    """Every rank has the one tensor; DCP has one of them write it. The files on disk."""
    dcp_save({"w": torch.arange(9.0)}, storage_writer=checkpoint.dcp.StorageWriter(folder / "step"))
    return sorted(file.name for file in (folder / "step").rglob("*.safetensors"))


def save_after_damage(rank: int, folder: Path) -> list[list[int]]:
    """What `retire` keeps of steps saved by DCP: rank 1 alone has read damage of one, and then that
    it was mended.
    """
    manager = checkpoint.Manager(folder / "run", keep=2)

    def save(step: int) -> list[int]:
        writer = checkpoint.dcp.StorageWriter(manager.path(step))
        dcp_save({"w": torch.full((9000,), step)}, storage_writer=writer)
        if not rank:
            manager.retire()
        dist.barrier()
        steps = manager.steps()
        dist.barrier()
        return steps

    kept = [save(step) for step in (1, 2)]
    (file,) = manager.path(2).rglob("*.safetensors")
    sound = file.read_bytes()
    if rank == 1:
        file.write_bytes(sound[:4096] + b"damage" + sound[4102:])
        assert complaint(partial(checkpoint.load, manager.path(2)))
    kept.append(save(3))
    if rank == 1:
        file.write_bytes(sound)
        checkpoint.load(manager.path(2))
    return [*kept, save(4)]
