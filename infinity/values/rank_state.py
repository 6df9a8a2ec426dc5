"""What each rank has for itself: its buffers and what its caller gave, as far as they are not those
of rank 0.

Parameters and their optimizer state are one whole that is partitioned; they belong to no rank.
Everything else is a rank's own: running statistics follow the batches that it saw, ``extra`` may
hold where its data loader is. What is the same on every rank, bit by bit, is stored once. A rank
that loads takes what the rank of its number saved; one beyond the ranks that saved takes what rank
0 saved.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint.directory.locate import peek_saved
from checkpoint.interop.packing import pack, unpack
from checkpoint.ranks.coordinator import Coordinator, Operation, together
from checkpoint.ranks.turn import Turn, in_turn
from infinity.ranks.agreement import RankDifferenceError
from infinity.ranks.context import RankContext
from infinity.values.component_bytes import BytesOfRank
from infinity.values.module_state import (
    WRITTEN,
    Buffers,
    buffers_of,
    module_states,
    set_buffer,
)

logger = logging.getLogger(__name__)
_EXTRA = "extra"
_BUFFER = "buffer."
_MODULE = "module."


def own_states(
    coordinator: Coordinator, model: nn.Module, extra: Any, begin: Callable[[], None]
) -> dict[str, BytesOfRank]:
    """By the number of each rank that has something else than rank 0: that, as this rank has to
    name it. Collective.

    It is a copy, which takes its size in memory. Raises as ``checkpoint.save`` for ``extra``, and
    what ``begin``, which comes first, raises on any rank.
    """
    if coordinator.world_size == 1:
        begin()
        return {}
    parts: dict[str, Any] = {_EXTRA: {"value": extra}}

    def digests_of_parts() -> dict[str, str]:
        begin()
        parts.update({_BUFFER + name: buffer for name, buffer in buffers_of(model).items()})
        parts.update({_MODULE + name: state for name, state in module_states(model).items()})
        return {name: _digest(part) for name, part in parts.items()}

    def compare(turn: Turn) -> tuple[torch.Tensor | None, list[int]]:
        every = turn.together(digests_of_parts)
        first = every[0]
        digests = every[coordinator.rank]
        mine = {name: p for name, p in parts.items() if digests[name] != first.get(name)}
        without = first.keys() - digests.keys()
        mine.update({name: {} for name in without if name.endswith(WRITTEN)})
        packed: list[torch.Tensor | None] = []

        def packed_size() -> int:
            packed.append(pack(mine) if mine else None)
            return 0 if packed[0] is None else packed[0].numel()

        sizes = turn.together(packed_size, ends=lambda _: True)
        return packed[0], sizes

    packed, sizes = in_turn(coordinator, Operation.OWN, compare)
    return {
        str(rank): BytesOfRank(size, packed if rank == coordinator.rank else None)
        for rank, size in enumerate(sizes)
        if size and coordinator.rank in (0, rank)
    }


def _digest(part: Any) -> str:
    return hashlib.sha256(pack(part).numpy().data).hexdigest()


def own_parts(read: Callable[..., Any], rank: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank saved for itself; nothing where that was what rank 0 saved.

    ``read`` is ``checkpoint.load`` of a checkpoint of which ``saved`` are the scalars. Raises as
    that.
    """
    if rank not in saved.get("own_states", ()):
        return {}
    parts: dict[str, Any] = unpack(read(only=[f"ranks.{rank}"])["ranks"][str(rank)])
    return parts


def own_buffers(parts: Mapping[str, Any], model: nn.Module) -> Buffers:
    """Those of ``own_parts`` that ``model`` has: they come in the place of what rank 0 saved."""
    return {name: parts[_BUFFER + name] for name in buffers_of(model) if _BUFFER + name in parts}


def restore_own(
    parts: Mapping[str, Any], model: nn.Module, device: torch.device
) -> tuple[bool, Any, dict[str, Any]]:
    """Fill ``model`` with the buffers that this rank saved; gives whether it saved an ``extra`` of
    its own, and that, and the states of modules that it saved.
    """
    for name, value in own_buffers(parts, model).items():
        set_buffer(model, name, None if value is None else value.to(device))
    states = {
        name.removeprefix(_MODULE): value
        for name, value in parts.items()
        if name.startswith(_MODULE)
    }
    return _EXTRA in parts, parts.get(_EXTRA, {}).get("value"), states


def saves_seen(rank_context: RankContext, path: str | os.PathLike[str]) -> list[int | None]:
    """When what is at ``path`` was saved, as every rank sees it: tells saves apart.

    Raises ``RankDifferenceError`` on every rank where they are given different paths.
    """
    if rank_context.world_size == 1:
        return [peek_saved(Path(path))]
    every: list[Any] = together(
        rank_context.coordinator, lambda: [Path(path).resolve().name, peek_saved(Path(path))]
    )
    for rank, (name, _) in enumerate(every):
        if name != every[0][0]:
            raise RankDifferenceError(
                f"rank 0 loads {every[0][0]}, rank {rank} {name}; every rank has to give the same "
                "path"
            )
    return [saved for _, saved in every]


def check_same_save(seen: Sequence[int | None], path: str | os.PathLike[str]) -> None:
    """Raises ``RankDifferenceError``, on every rank, where they do not see the same save."""
    for rank, saved in enumerate(seen):
        if saved != seen[0]:
            raise RankDifferenceError(
                f"rank {rank} sees another save at {path} than rank 0; every rank has to give the "
                "same path, on a file system that all ranks see"
            )


def random_of_ranks(
    rank_context: RankContext, device: torch.device
) -> dict[str, dict[str, BytesOfRank]]:
    """The states of random generators of ranks other than the first; each has its own."""
    found: dict[str, dict[str, BytesOfRank]] = {}
    for rank in range(1, rank_context.world_size):
        own = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            own["device"] = torch.cuda.get_rng_state(device)
        found[str(rank)] = {
            name: BytesOfRank(state.numel(), state if rank == rank_context.rank else None)
            for name, state in own.items()
        }
    return found


def random_state() -> dict[str, Any]:
    """The states of torch's random generators of this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random(rank: int, device: torch.device, saved: Mapping[str, Any]) -> None:
    """Every rank takes its own; one that did not take part in the save keeps what it has."""
    if rank:
        own = saved.get("random_of_ranks", {}).get(str(rank), {})
        if "cpu" in own:
            torch.set_rng_state(own["cpu"])
        if "device" in own and device.type == "cuda":
            torch.cuda.set_rng_state(own["device"], device)
        return
    random = saved.get("random")
    if random is None:  # what another library saved has none
        return
    torch.set_rng_state(random["cpu"])
    if torch.cuda.is_available() and len(random["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(random["cuda"])
