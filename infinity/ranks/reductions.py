"""Gradients on their way from the ranks that computed them to the rank that keeps them.

The gradient of a partitioned parameter is cut like the parameter; each rank gets its slice from all
others and takes the mean. Gradients of small parameters are collected, passed to every rank in one
transfer, and every rank takes the same mean of the same values. Sums are taken in the order of the
ranks, 16-bit ones in float32, so a mean does not depend on the backend and is the same on all
ranks.

Transfers run in the background, two at a time; ``finish`` waits for all.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity.parameters.records import Record
from infinity.ranks.agreement import RankDifferenceError
from infinity.ranks.collectives import REDUCE, SMALL, Ranks, Transfer
from infinity.ranks.gathered_weights import GatherMemory
from swap.plain import plain

_MAX_IN_FLIGHT = 2
_BUCKET_BYTES = 4 << 20
_SUM_ELEMENTS = 256 * 1024
_ALIGNMENT = 8

Store = Callable[[int, torch.Tensor], None]
"""Takes the mean of a parameter's gradient: what this rank keeps of it, flat."""
Lose = Callable[[int, BaseException], None]
"""Lets no step be taken with what there is of a parameter's gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """Slices of one gradient, or small ones, of all ranks on their way into ``parts``."""

    index: int
    parts: list[torch.Tensor]
    transfer: Transfer


class Reductions:
    """Means of gradients over ranks. ``add`` and ``finish`` are collective, ``drop`` is not."""

    def __init__(
        self,
        records: Sequence[Record],
        ranks: Ranks,
        memory: GatherMemory,
        store: Store,
        lose: Lose,
    ) -> None:
        self._records = records
        self._ranks = ranks
        self._memory = memory
        self._store, self._lose = store, lose
        self._exchanges: deque[_Exchange] = deque()
        self._bucket: list[tuple[int, torch.Tensor]] = []
        self._bucket_bytes = 0
        memory.make_room.append(self.finish_exchanges)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Pass on a gradient that has just been computed, whole; it belongs to this object now.

        Raises ``RankFailedError``, also when another rank has the gradient of another parameter.
        """
        flat = plain(gradient.detach()).reshape(-1)
        if not self._records[index].is_partitioned:
            self._collect(index, flat)
            return
        while len(self._exchanges) >= _MAX_IN_FLIGHT:
            self._finish_oldest()
        cut = self._records[index].cut
        length = cut.length(self._ranks.rank)
        numel = length * self._ranks.world_size
        given = flat.contiguous()

        def exchange() -> None:
            meet = partial(self._ranks.meet, REDUCE, index)
            received = self._memory.take(numel, given.dtype, meet)
            if received is None:
                name = self._records[index].name
                raise self._memory.error(numel * given.dtype.itemsize, f"the gradient of {name}")
            transfer = self._ranks.exchange(given, received, cut.lengths)
            parts = list(received.view(self._ranks.world_size, -1))
            self._exchanges.append(_Exchange(index, parts, transfer))

        self._ranks.undivided(exchange)

    def has(self, index: int) -> bool:
        """Whether a gradient of this parameter is on its way."""
        return any(exchange.index == index for exchange in self._exchanges) or any(
            entry[0] == index for entry in self._bucket
        )

    def finish(self) -> None:
        """Wait until every gradient is stored."""
        self.finish_exchanges()
        self._send_bucket()

    def finish_exchanges(self) -> None:
        """Wait for what is under way; starts nothing, so that it need not be called on all ranks
        at once.
        """
        while self._exchanges:
            self._finish_oldest()

    def drop(self, index: int | None = None) -> None:
        """Forget gradients on their way, of one parameter or of all."""
        for exchange in list(self._exchanges):
            if index is None or exchange.index == index:
                exchange.transfer.wait()
                self._exchanges.remove(exchange)
        self._bucket = [entry for entry in self._bucket if index is not None and entry[0] != index]
        self._bucket_bytes = sum(_padded(gradient) for _, gradient in self._bucket)

    def _finish_oldest(self) -> None:
        exchange = self._exchanges[0]
        exchange.transfer.wait()  # again, after an interrupt
        try:
            self._store(exchange.index, mean_of(exchange.parts))
            self._exchanges.popleft()
        except BaseException as failure:  # it is kept or not, and may have been overwritten
            self._lose(exchange.index, failure)
            if exchange in self._exchanges:
                self._exchanges.remove(exchange)
            raise

    def _collect(self, index: int, gradient: torch.Tensor) -> None:
        self._bucket.append((index, gradient))
        self._bucket_bytes += _padded(gradient)
        if self._bucket_bytes >= _BUCKET_BYTES:
            self._send_bucket()

    def _send_bucket(self) -> None:
        """Give every rank the small gradients of all; meets the others even with none, so that one
        that has some does not wait for them.
        """
        self._ranks.undivided(self._exchange_bucket)
        self.finish_exchanges()

    def _exchange_bucket(self) -> None:
        bucket = self._bucket
        sizes = [_padded(gradient) for _, gradient in bucket]
        # Before ranks meet: without memory for it nothing is begun, and nothing forgotten.
        own = _packed([gradient for _, gradient in bucket], sizes)
        every = own.new_empty(own.numel() * self._ranks.world_size)
        digest = hash(tuple(index for index, _ in bucket))
        rows = self._ranks.meet(REDUCE, SMALL, digest)
        if any(row[3] != digest for row in rows):
            self._tell_difference([index for index, _ in bucket])
        # Not before: who is refused and asks again is not to go on without them.
        self._bucket, self._bucket_bytes = [], 0
        if not bucket:
            return
        offsets = [own.numel() * rank for rank in range(self._ranks.world_size + 1)]
        transfer = self._ranks.gather(own, every, offsets)
        transfer.wait()
        # Not rows of a view: those without elements begin where no gradient may.
        rows_of = [every[low:high] for low, high in itertools.pairwise(offsets)]
        for (index, gradient), at in zip(bucket, _starts(sizes), strict=True):
            nbytes = gradient.numel() * gradient.dtype.itemsize
            parts = [row[at : at + nbytes].view(gradient.dtype) for row in rows_of]
            self._exchanges.append(_Exchange(index, parts, transfer))

    def _tell_difference(self, indices: list[int]) -> None:
        every = self._ranks.coordinator.exchange(indices)
        here = self._ranks.rank
        for rank, theirs in enumerate(every):
            for index in sorted(set(indices) ^ set(theirs)):
                has, has_not = (here, rank) if index in indices else (rank, here)
                raise RankDifferenceError(
                    f"{self._records[index].name} has a gradient on rank {has} and none on rank "
                    f"{has_not}: every rank has to use the same parameters in the same order"
                )
        raise RankDifferenceError(
            "small parameters got their gradients in another order on some ranks: every rank has "
            "to run the same modules in the same order"
        )


def mean_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of flat tensors, added up in their order; overwrites the first, and is it."""
    total = parts[0]
    if total.dtype not in (torch.bfloat16, torch.float16):
        for part in parts[1:]:
            total.add_(part)
        return total.div_(len(parts))
    for start in range(0, total.numel(), _SUM_ELEMENTS):
        stop = start + _SUM_ELEMENTS
        wide = total[start:stop].to(torch.float32)
        for part in parts[1:]:
            wide.add_(part[start:stop])
        total[start:stop] = wide.div_(len(parts))
    return total


def _packed(gradients: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The bytes of gradients, one after the other, each in as many as ``sizes`` says."""
    device = gradients[0].device if gradients else "cpu"
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    for gradient, at in zip(gradients, _starts(sizes), strict=True):
        # One element may have any stride, and is no row of bytes then.
        raw = gradient.contiguous().as_strided(gradient.shape, (1,)).view(torch.uint8)
        packed[at : at + raw.numel()] = raw
    return packed


def _padded(gradient: torch.Tensor) -> int:
    nbytes = gradient.numel() * gradient.dtype.itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
