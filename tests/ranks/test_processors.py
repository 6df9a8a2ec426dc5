"""Ranks of one machine share its processors out among themselves."""

from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import nn

import infinity
from swap.interruptions.apart import run_apart
from swap.processors import num_threads
from tests.support.ranks import run_ranks


def threads_in_background(rank: int, folder: Path) -> list[int]:
    found: list[int] = []

    def look() -> None:
        run_apart(lambda: found.append(num_threads(None)), "look")

    nvme = folder / f"nvme-{rank}"
    nvme.mkdir()
    group = dist.group.WORLD
    with (
        mock.patch("swap.processors.num_processors", return_value=8),
        mock.patch("os.sched_getaffinity", return_value=set(range(8))),
    ):
        look()
        with infinity.offload(nn.Linear(8, 8), str(nvme), host_memory="64MiB", process_group=group):
            look()
        look()
    return found


def test_kernels_in_the_background_take_the_part_of_a_rank_inside_the_block(tmp_path: Path) -> None:
    assert run_ranks(threads_in_background, tmp_path / "job", 2) == [[8, 4, 8]] * 2
