"""What ranks do that have several blocks in one process group, or give the group up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint
import infinity
from checkpoint.ranks import group
from infinity.ranks.collectives import Ranks, Transfer
from tests.support.models import seeded, vector_loss
from tests.support.rank_jobs import stack, world

_WIDTH = 512
_SECONDS = 10.0


def outputs_by_threads(rank: int, folder: Path) -> list[float]:
    """What two models give whose blocks have one group, each used by a thread of its own: this rank
    starts the transfer of the model of its number first.
    """
    models = [_constant(value) for value in (1.0, 2.0)]
    given = [0.0, 0.0]
    gather, has_started = Ranks.gather, threading.Event()

    def in_turn(*arguments: Any) -> Transfer:
        if threading.current_thread().name != str(rank):
            has_started.wait(_SECONDS)
        try:
            return gather(*arguments)
        finally:
            has_started.set()

    def use(index: int) -> None:
        with torch.no_grad():
            given[index] = models[index](torch.ones(1, _WIDTH))[0, 0].item()

    with ExitStack() as blocks:
        for model in models:
            blocks.enter_context(
                infinity.offload(model, folder, host_memory="64MiB", process_group=world())
            )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "gather", in_turn)
            _run_together([partial(use, index) for index in range(2)])
    return given


def met_on_threads(rank: int, folder: Path) -> list[list[int]]:
    """Who meets in two coordinators of one group, each made on a thread of its own at one moment.
    Sleeping widens the window between two that count.
    """
    met: list[list[int]] = []
    beside = group._store_beside

    def late(*arguments: Any) -> Any:
        time.sleep(0.1)
        return beside(*arguments)

    def make() -> None:
        coordinator = group.GroupCoordinator(world(), timeout_seconds=_SECONDS)
        met.append(coordinator.exchange(rank))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_store_beside", late)
        _run_together([make, make])
    return met


def destroyed_in_the_block(rank: int, folder: Path, *, gives_up: Sequence[int]) -> list[float]:
    """Sums of the weights after two steps; these ranks destroy the group before the second."""
    model = seeded(stack)
    with infinity.offload(model, folder, host_memory="64MiB", process_group=world()) as offloaded:
        for step in range(2):
            if step and rank in gives_up:
                dist.destroy_process_group()
            offloaded.backward(vector_loss(model, 10 * step + rank))
            offloaded.step()
    return [value.double().sum().item() for value in model.state_dict().values()]


def _constant(value: float) -> nn.Module:
    model = nn.Linear(_WIDTH, _WIDTH, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def _run_together(actions: Sequence[Callable[[], None]]) -> None:
    """Each on a thread that has its number for a name."""
    threads = [
        threading.Thread(target=action, name=str(number)) for number, action in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def saved_behind_an_exit(rank: int, folder: Path, *, exits: Sequence[int]) -> None:
    """A save in the background while these ranks leave the block by an exception, of which the
    others, who take a step, are told. Raises what became of the save.
    """
    model = seeded(stack)
    with (
        suppress(SystemExit, infinity.RankFailedError),
        infinity.offload(model, folder, host_memory="64MiB", process_group=world()) as offloaded,
    ):
        pending = offloaded.save(folder / "step", block=False, extra=rank)
        if rank in exits:
            raise SystemExit
        offloaded.backward(vector_loss(model, rank))
        offloaded.step()
    pending.result()
    checkpoint.load(folder / "step")
