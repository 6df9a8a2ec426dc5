"""What ranks have to agree on before they train together, and what they share: machines and disks.

Whatever ranks do not agree on is told on every rank, by name, before anything is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpoint.errors import RankFailedError
from checkpoint.transfer.memory import machine
from infinity.parameters.records import Record
from infinity.ranks.collectives import Ranks
from infinity.ranks.options import told
from swap.interruptions.apart import run_apart
from swap.interruptions.undo import Undo
from swap.plan.rules import UpdateRule

_SHORT = 200


class RankDifferenceError(ValueError):
    """Ranks have to be given the same, or to do the same, and were not or did not."""


def open_ranks(undo: Undo, process_group: Any, device: torch.device) -> Ranks | None:
    """The ranks of ``process_group``; None for no group, or one of this process alone. ``undo``
    lets go of them, and tells the others if that is because of an error.
    """
    if process_group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "process_group was given, but there are no process groups; call "
            "torch.distributed.init_process_group() first"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}, not a "
            "torch.distributed.ProcessGroup; pass torch.distributed.group.WORLD, or what new_group "
            "returned"
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("this process is not a rank of process_group")
    if dist.get_world_size(process_group) == 1:
        return None
    made: list[Ranks] = []

    def leave(_kind: object, error: BaseException | None, _trace: object) -> None:
        for ranks in made:
            ranks.leave(error)

    undo.push(leave)
    # All of it, or the others would wait for an interrupted rank, and count one more than it has.
    run_apart(lambda: made.append(Ranks(process_group, device)), "infinity-ranks")
    return made[0]


@contextmanager
def on_all_ranks(ranks: Ranks | None) -> Iterator[None]:
    """What is done inside is done by all ranks, or raises on all: where it failed what failed, and
    ``RankFailedError`` on the others.
    """
    try:
        yield
    except RankFailedError:
        raise
    except Exception as error:  # of whatever kind: the others wait for it
        if ranks is not None:
            ranks.coordinator.exchange(error)
        raise
    if ranks is not None:
        ranks.coordinator.exchange(None)


def check_same(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raises ``RankDifferenceError`` on every rank, naming a fact that is not the same on all and
    the ranks that differ. ``facts`` are JSON values.
    """
    every = ranks.coordinator.exchange(dict(facts))
    for rank, theirs in enumerate(every):
        for name in dict.fromkeys([*every[0], *theirs]):
            if name not in every[0] or name not in theirs:
                has, has_not = (0, rank) if name in every[0] else (rank, 0)
                raise RankDifferenceError(f"{name}: rank {has} has it, rank {has_not} has not")
            if every[0][name] != theirs[name]:
                raise RankDifferenceError(
                    f"{name} is {_short(every[0][name])} on rank 0 and {_short(theirs[name])} on "
                    f"rank {rank}; every rank has to be given the same"
                )


def facts_of(
    model: nn.Module,
    records: Sequence[Record],
    rule: UpdateRule,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """What of a model and of options has to be the same on every rank."""
    facts: dict[str, Any] = {name: told(value) for name, value in options.items()}
    facts["the rule of updates"] = type(rule).__name__
    facts["the number of parameters"] = len(records)
    for record in records:
        kind = "trained" if record.spec.trainable else "frozen"
        if record.dtype != record.spec.dtype:  # in which its values are given back
            kind += f", of a model in {record.dtype}"
        facts[f"parameter {record.name}"] = f"{list(record.shape)} {record.spec.dtype} {kind}"
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = f"{list(buffer.shape)} {buffer.dtype}"
    return facts


def check_devices(ranks: Ranks, device: torch.device) -> None:
    """Raises ``RankDifferenceError`` where two ranks would compute on the same GPU with NCCL."""
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    own: list[Any] = [machine(), device.type, index]
    every = ranks.coordinator.exchange(own)
    for rank, (_, kind, _) in enumerate(every):
        if kind != every[0][1]:
            raise RankDifferenceError(f"rank 0 computes on {every[0][1]}, rank {rank} on {kind}")
    if device.type != "cuda" or dist.get_backend(ranks.group) != "nccl":
        return
    seen: dict[tuple[str, int], int] = {}
    for rank, (host, _, number) in enumerate(every):
        other = seen.setdefault((host, number), rank)
        if other != rank:
            raise RankDifferenceError(
                f"ranks {other} and {rank} are on the same GPU, cuda:{number}; call "
                "torch.cuda.set_device(local_rank) before, or pass device="
            )


def ranks_here(ranks: Ranks | None) -> int:
    """How many ranks are on this machine, this one included."""
    if ranks is None:
        return 1
    return ranks.coordinator.exchange(machine()).count(machine())


def divided_by_ranks(
    ranks: Ranks, directories: Sequence[str], bandwidths: Sequence[float] | None
) -> list[float]:
    """How much of its load a rank gives to each of its directories: by the bandwidth (by default
    all have the same), of which every rank that uses the disk gets an equal part.
    """
    own = [[machine(), Path(directory).stat().st_dev] for directory in directories]
    every = ranks.coordinator.exchange(own)
    users = Counter(
        disk for theirs in every for disk in {(host, number) for host, number in theirs}
    )
    speeds = [1.0] * len(directories) if bandwidths is None else bandwidths
    return [
        speed / users[(str(host), int(str(number)))]
        for speed, (host, number) in zip(speeds, own, strict=True)
    ]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHORT else text[:_SHORT] + "..."
