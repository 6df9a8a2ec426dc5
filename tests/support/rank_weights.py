"""Single ranks in tests that begin with the weights of a checkpoint, or export one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import checkpoint
import infinity
from checkpoint.loading.opened import OpenCheckpoint
from infinity.model import training_of
from infinity.values import persistence
from tests.support.interrupts import interrupt, sampled
from tests.support.models import Stack, vector_loss
from tests.support.rank_jobs import complaint, stack, world
from tests.support.training import same_values, values_of

WIDTH = 400
_FIRST_LINES = 14
"""Of an export: before its guard a rank has not come yet, and does not say so."""


def weights_of_a_checkpoint(rank: int, folder: Path) -> dict[str, Any]:
    """All ranks save; all of them, two, and one (with tiles) begin with what was saved. Gives the
    bytes that this rank read each time.
    """
    path = folder / "checkpoint"
    model = stack(WIDTH)
    with infinity.offload(model, folder, host_memory="256MiB", process_group=world()) as offloaded:
        vector_loss(model, 0, width=WIDTH).backward()
        offloaded.step()
        offloaded.save(path)
    expected = checkpoint.load(path, only=["model.*"])["model"]
    groups = {count: dist.new_group(range(count)) for count in (1, 2, 3)}
    read: dict[str, Any] = {}
    for count, group in groups.items():
        if rank < count:
            tiles = 300_000 if count == 1 else None
            read[str(count)] = _begin(group, folder, path, expected, tiles)
        dist.barrier()
    return read


def _begin(
    group: Any,
    folder: Path,
    path: Path,
    expected: dict[str, torch.Tensor],
    max_parameter_bytes: int | None,
) -> int:
    with torch.device("meta"):
        model = Stack(width=WIDTH, depth=3)
    nbytes = 0
    finish = OpenCheckpoint._finish

    def counted(opened: OpenCheckpoint, read: Any) -> None:
        nonlocal nbytes
        finish(opened, read)
        nbytes += len(read.into)

    with (
        mock.patch.object(OpenCheckpoint, "_finish", counted),
        infinity.offload(
            model,
            folder,
            host_memory="256MiB",
            weights=path,
            process_group=group,
            max_parameter_bytes=max_parameter_bytes,
        ) as offloaded,
    ):
        first_bytes = nbytes
        offloaded.export(folder / f"export-{group.size()}")
    dist.barrier(group)
    (shard,) = (folder / f"export-{group.size()}").glob("*.safetensors")
    exported = load_file(shard)
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(exported[name], value), name
    return first_bytes


def masters_of_a_checkpoint(rank: int, folder: Path) -> bool:
    """Whether a block that begins with what ranks saved in bfloat16 ends with their masters."""
    ends = []
    for weights in (None, folder / "checkpoint"):
        model = stack(WIDTH)
        with infinity.offload(
            model,
            folder,
            host_memory="256MiB",
            compute_dtype=torch.bfloat16,
            weights=weights,
            process_group=world(),
        ) as offloaded:
            if weights is None:
                vector_loss(model, 0, width=WIDTH).backward()
                offloaded.step()
                offloaded.save(folder / "checkpoint")
        ends.append(values_of(model))
    return same_values(*ends)


COUNT = 4
COUNTED_BYTES = 128 << 20


class Counted:
    """The part that a rank has of numbers counted from ``first`` on; they are nowhere in memory."""

    dtype = torch.int64
    shape = (COUNTED_BYTES // 8,)

    def __init__(self, rank: int, world_size: int, first: int) -> None:
        low, high = (self.shape[0] * k // world_size for k in (rank, rank + 1))
        self.ranges = ((low, high - low),)
        self._first = first

    def read(self, start: int, out: memoryview) -> None:
        begin = self._first + start // 8
        values = torch.arange(begin, begin + len(out) // 8)
        torch.frombuffer(out, dtype=torch.int64).copy_(values)


def save_counted(rank: int, folder: Path) -> None:
    """Every rank saves its part of tensors that are larger than what an export may take."""
    coordinator = checkpoint.GroupCoordinator()
    parts = {f"w{k}": Counted(rank, coordinator.world_size, k) for k in range(COUNT)}
    state = {"model": parts, "optimizer": {"step": torch.ones(3)}}
    checkpoint.save(state, folder / "checkpoint", coordinator=coordinator)


def interrupted_exports(
    rank: int, folder: Path, *, wanted: int, seed: int
) -> dict[str, list[list[str]]]:
    """Rank 1, then rank 0, is interrupted at lines of the main thread in an export; for each point
    the line, or what this rank is told. After each an export of both works.
    """
    told: dict[str, list[list[str]]] = {}
    out = folder / "out"
    with infinity.offload(
        Stack(), folder, host_memory="256MiB", process_group=world()
    ) as offloaded:
        for interrupted in (1, 0):

            def export() -> object:
                return persistence.export(training_of(offloaded), out)

            export()
            lines = interrupt(export, None).seen if rank == interrupted else export() and 0
            counts: list[Any] = [None, None]
            dist.all_gather_object(counts, lines)
            points = told[f"rank {interrupted}"] = []
            for number in sampled(counts[interrupted] - _FIRST_LINES, wanted, seed):
                if rank == interrupted:
                    points.append([interrupt(export, _FIRST_LINES + number).line])
                else:
                    points.append([complaint(export)])
                dist.barrier()
                export()
                assert not out.with_name(".out.parts").exists()
    return told
