"""Rank 0 of two without a process group: the other one is played by what it would send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from infinity.parameters.records import Record, records_of

T = TypeVar("T")


@dataclass
class PlayedTransfer:
    """Arrives when it is waited for."""

    target: torch.Tensor
    values: torch.Tensor
    has_arrived: bool = False

    def wait(self) -> None:
        if not self.has_arrived:
            self.target.copy_(self.values)
            self.has_arrived = True
            self.target = self.values  # holds no memory of who is tested


@dataclass
class TwoRanks:
    """Rank 0 of two. What rank 1 sends is ours times ``factor``."""

    rank: int = 0
    world_size: int = 2
    factor: float = 3.0
    meetings: list[tuple[int, int]] = field(default_factory=list)
    transfers: list[PlayedTransfer] = field(default_factory=list)

    def meet(self, kind: int, number: int, digest: int = 0) -> list[list[int]]:
        self.meetings.append((kind, number))
        return [[kind, number, 0, digest]] * self.world_size

    def undivided(self, action: Callable[[], T]) -> T:
        return action()

    def exchange(
        self, flat: torch.Tensor, out: torch.Tensor, lengths: Sequence[int]
    ) -> PlayedTransfer:
        own = flat[: lengths[0]]
        return self._transfer(out, torch.cat([own, (own * self.factor).to(own.dtype)]))

    def gather(
        self, part: torch.Tensor, whole: torch.Tensor, offsets: Sequence[int]
    ) -> PlayedTransfer:
        theirs = part
        if part.dtype != torch.uint8:
            theirs = (part * self.factor).to(part.dtype)
        every = torch.cat([part, theirs[: offsets[2] - offsets[1]]])
        return self._transfer(whole, every)

    def _transfer(self, target: torch.Tensor, values: torch.Tensor) -> PlayedTransfer:
        self.transfers.append(PlayedTransfer(target.view(-1), values))  # as the bytes of it
        return self.transfers[-1]


def lose(index: int, failure: BaseException) -> None:
    """Nothing is to be lost."""
    raise AssertionError(f"the gradient of {index} was lost") from failure


def partitioned_records(count: int = 4) -> list[Record]:
    model = nn.ModuleList(nn.Linear(256, 256) for _ in range(count))
    return records_of(model, None, rank=0, world_size=2)


def large_of(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.is_partitioned]
