"""A model whose parameters are partitioned over ranks: ZeRO-3 over what each rank's tiers hold.

Each rank's ``TieredState`` holds its slices of the large parameters and all of the small ones, and
knows nothing of other ranks. Here whole weights are gathered from slices, gradients are reduced to
slices, and what a step depends on is made the same on all ranks.

The norm is added up from the sums of squares of blocks of a fixed size in the order of the
parameters' elements, so it has the same bits on every rank, and on any number of ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from aio.process.threads import Latch
from checkpoint.errors import RankFailedError
from checkpoint.format.checksum import crc32c
from checkpoint.ranks.coordinator import Coordinator, Operation, tell
from infinity.parameters.first_values import StoredValues
from infinity.parameters.local_values import read_values, weight_of, write_back
from infinity.parameters.offloaded.placeholders import device_of_values
from infinity.parameters.records import Record
from infinity.ranks.agreement import RankDifferenceError, check_same, on_all_ranks
from infinity.ranks.collectives import CHANGE, NORM, STEP, VALUES, Ranks, as_bytes
from infinity.ranks.gathered_weights import GatheredWeights, GatherMemory, Weights
from infinity.ranks.options import told
from infinity.ranks.reductions import Reductions
from swap.interruptions.apart import run_apart
from swap.plain import plain
from swap.plan.layout import PIECE
from swap.tiered import TieredState

T = TypeVar("T")
_SUMMED = 1 << 18
"""Elements that are summed at a time."""


class Zero3:
    """A ``RankContext``. Raises ``RankFailedError`` when another rank failed or is gone."""

    def __init__(
        self,
        ranks: Ranks,
        records: Sequence[Record],
        state: TieredState,
        memory: GatherMemory,
        *,
        capacity_bytes: int,
        prefetch: bool,
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.coordinator: Coordinator = ranks.saving
        self._gathered = GatheredWeights(
            records,
            state.weights,
            ranks,
            memory,
            capacity_bytes=capacity_bytes,
            timeline=state.timeline,
            prefetch=prefetch,
        )
        self.weights: Weights = self._gathered
        self._records = records
        self._state = state
        state.gradients.keep_blocks = True
        self._memory = memory
        store, lose = state.add_gradient, state.gradients.lose
        self._reductions = Reductions(records, ranks, memory, store, lose)
        self.outside_bytes = capacity_bytes // 2
        self._sums: dict[str, int] = {}
        self._changes: dict[str, int] = {}
        """Checksums of what programs made of gradients since the last step."""
        self._arrivals: dict[int, int] = {}
        """How often each gradient that is there was added to since it was cleared or set. All ranks
        add at once, so what has the same number everywhere has the same passes everywhere.
        """
        self._with_values: set[int] = set()
        """Partitioned parameters that came with values, or had some, on one rank at least."""
        self._step = 0
        ranks.names = [record.name for record in records]

    def leave(self, error: BaseException | None) -> None:
        if error is not None:
            self.ranks.leave_training(error)

    @property
    def is_whole(self) -> bool:
        return self.ranks.coordinator.is_open

    @property
    def peak_host_bytes(self) -> int:
        return self._memory.peak_host_bytes

    # Values.

    def note(
        self, record: Record, values: torch.Tensor | StoredValues
    ) -> torch.Tensor | StoredValues:
        if isinstance(values, StoredValues):
            self._sums[f"the values of {record.name}"] = _sum_of_stored(values)
            return values.part(record.first, record.spec.numel)
        flat = values.detach().reshape(-1)
        self._sums[f"the values of {record.name}"] = _sum_of(flat)
        return flat[record.first : record.first + record.spec.numel]

    def agree_on_values(self) -> None:
        try:
            check_same(self.ranks, self._sums)
        except RankDifferenceError as error:
            raise RankDifferenceError(
                f"{error} (these are checksums); make the model alike on every rank, for example "
                "with the same torch.manual_seed before, or pass weights="
            ) from None
        self._sums.clear()
        every = self.ranks.coordinator.exchange(
            [
                record.index
                for record in self._records
                if record.is_partitioned and device_of_values(record.parameter).type != "meta"
            ]
        )
        self._with_values.update(*every)

    def is_given_back(self, record: Record) -> bool:
        return record.device.type != "meta" or record.index in self._with_values

    def weight_of(self, record: Record) -> torch.Tensor:
        if not record.is_partitioned:
            return weight_of(self._state, record)
        part = torch.empty(record.spec.numel, dtype=record.spec.dtype, device="cpu")
        self._state.components.read(record.index, "weight", 0, part)
        whole = self._whole(record, part.to(self._state.device))
        return whole.view(record.shape)

    def write_back(self, records: Sequence[Record]) -> None:
        """Raises ``RankDifferenceError`` unless every rank made the same change, and, where one
        cannot keep it, what that failed of there and ``RankFailedError`` on the others: all have
        what there was before then.
        """
        for record in records:
            self._check_change(record)
        # Of several ranks that an interrupt comes to, none is to have what the others have not.
        run_apart(partial(self._write_back, records), "infinity-modify")

    def _write_back(self, records: Sequence[Record]) -> None:
        put_back: list[Callable[[], None]] = []
        try:
            with on_all_ranks(self.ranks):
                put_back.append(write_back(self._state, records))
        except RankFailedError:
            for undo in put_back:  # others have their parts from before the change
                undo()
            raise
        finally:
            self.weights.drop()

    def _check_change(self, record: Record) -> None:
        digest = _sum_of(record.parameter.data.reshape(-1))
        rows = self.ranks.meet(CHANGE, record.index, digest)
        for rank, row in enumerate(rows):
            if row[3] != rows[0][3]:
                raise RankDifferenceError(
                    f"{record.name} was given other values on rank {rank} than on rank 0 inside "
                    "`gathered(..., modify=True)`; every rank has to make the same change"
                )

    def read_values(self, record: Record, out: torch.Tensor) -> None:
        if not record.is_partitioned:
            read_values(self._state, record, out)
        elif record.dtype == record.spec.dtype:
            out.copy_(self.weight_of(record))
        else:
            part = self._state.read_values(record.index, 0, record.spec.numel)
            whole = self._whole(record, part.to(self._state.device))
            out.view(-1).copy_(whole)

    def _whole(self, record: Record, part: torch.Tensor) -> torch.Tensor:
        def gather() -> torch.Tensor:
            whole = torch.empty(record.numel, dtype=part.dtype, device=part.device)
            self.ranks.meet(VALUES, record.index)
            self.ranks.gather(part, whole, record.cut.offsets).wait()
            return whole

        return self.ranks.undivided(gather)

    # Steps.

    def meet(self, kind: int, step: int) -> None:
        self.ranks.meet(kind, step)

    def meet_for(
        self, kind: int, steps: Sequence[int], action: Callable[[], T], *, tells: bool
    ) -> T:
        saving, met = self.ranks.saving, Latch()

        def num_told() -> int:
            # Not of a save that goes on in the background, which is no comparison of own states.
            others = saving.failures.total() - saving.failures[Operation.SAVE]
            return saving.exchanges[Operation.OWN] if tells else others

        before = num_told()

        def meet() -> None:
            self.meet(kind, max(steps))
            met.set()

        try:
            self.ranks.undivided(meet)
            return action()
        except Exception:  # told to the others where it failed, or by the meeting
            raise
        except BaseException as interrupt:
            if met.is_set() and num_told() == before:
                if tells:
                    with suppress(type(interrupt)):
                        tell(saving, Operation.OWN, interrupt)
                    tell(saving, Operation.SAVE, interrupt)  # and this raises it
                self.ranks.leave(interrupt)
            raise

    def note_change(self, record: Record, values: torch.Tensor) -> None:
        before = self._changes.get(record.name, 0)
        self._changes[record.name] = _sum_of(values, before)

    def begin_step(
        self,
        present: Sequence[int],
        steps: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        factors: Mapping[str, float],
    ) -> None:
        self._step = max(steps)
        options = [
            {key: told(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]
        groups_of = self._groups_of(groups)
        # Each rank has its slice of a changed gradient, and a copy of its own of a small one.
        changes = [(name, self._changes[name]) for name in sorted(self._changes)]
        arrivals = [self._arrivals.get(index, 0) for index in present]
        own = (list(present), arrivals, list(steps), options, groups_of, changes)
        digest = zlib.crc32(repr((own, sorted(factors.items()))).encode())
        rows = self.ranks.meet(STEP, self._step, digest)
        if all(row[3] == digest for row in rows):
            return
        facts: dict[str, Any] = {
            f"the step count of {record.name}": steps[record.index] for record in self._records
        }
        facts |= self._facts_of_presence(present)
        facts |= {
            f"how many gradients {self._records[index].name} got since its own was cleared": number
            for index, number in zip(present, arrivals, strict=True)
        }
        for number, group in enumerate(options):
            facts |= {f"{key} of parameter group {number}": value for key, value in group.items()}
        facts |= {
            f"which parameter groups {record.name} is in": groups_of[record.index]
            for record in self._records
        }
        facts |= {name: repr(value) for name, value in factors.items()}
        facts |= {
            f"what the program made of the gradient of {name} (a checksum)": value
            for name, value in changes
        }
        check_same(self.ranks, facts)

    def _groups_of(self, groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The numbers of the groups that each parameter is in."""
        index_of = {id(record.parameter): record.index for record in self._records}
        found: list[list[int]] = [[] for _ in self._records]
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if id(parameter) in index_of:  # any other is refused by name
                    found[index_of[id(parameter)]].append(number)
        return found

    def _facts_of_presence(self, present: Collection[int]) -> dict[str, Any]:
        there = frozenset(present)
        return {
            f"whether {record.name} has a gradient": record.index in there
            for record in self._records
        }

    def end_step(self, updated: Iterable[int]) -> None:
        self._changes.clear()
        self._arrivals.clear()
        outdated = list(updated)
        self.ranks.num_steps += bool(outdated)
        self._gathered.end_step(outdated)

    # Gradients.

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        self._state.gradients.check_memory(index, gradient)
        self._reductions.add(index, gradient)
        self._arrivals[index] = self._arrivals.get(index, 0) + 1

    def has_gradient(self, index: int) -> bool:
        return self._reductions.has(index)

    def finish_gradients(self) -> None:
        self._reductions.finish()

    def drop_gradients(self, index: int | None = None) -> None:
        self._reductions.drop(index)
        for record in self._records if index is None else [self._records[index]]:
            self._changes.pop(record.name, None)
            self._arrivals.pop(record.index, None)

    def norm(self) -> float:
        gradients = self._state.gradients
        present = sorted(gradients.present)
        cut = [index for index in present if self._records[index].is_partitioned]
        own = [gradients.block_squares(index) for index in cut]
        counts = [
            [_num_blocks(self._records[index].cut.length(rank)) for index in cut]
            for rank in range(self.world_size)
        ]
        lengths = [sum(each) for each in counts]

        def gather() -> list[torch.Tensor]:
            digest = zlib.crc32(repr(present).encode())
            if any(row[3] != digest for row in self.ranks.meet(NORM, self._step, digest)):
                # What follows has the size of all that is present.
                check_same(self.ranks, self._facts_of_presence(present))
            return self.ranks.coordinator.gather(torch.cat(own), lengths) if cut else []

        every = self.ranks.undivided(gather)
        sums: dict[int, float] = {}
        if cut:
            pieces = [part.split(each) for part, each in zip(every, counts, strict=True)]
            for position, index in enumerate(cut):
                sums[index] = _added_up([part[position] for part in pieces])
        for index in present:
            if index not in sums:
                sums[index] = _added_up([gradients.block_squares(index)])
        return math.sqrt(sum(sums[index] for index in present))

    def gradient(self, record: Record) -> torch.Tensor:
        part = self._state.gradients.read(record.index)
        if not record.is_partitioned:
            return part.view(record.shape)
        whole = self._whole(record, part.to(self._state.device))
        return whole.view(record.shape).cpu()


def _num_blocks(numel: int) -> int:
    return -(-numel // PIECE)


def _added_up(parts: Sequence[torch.Tensor]) -> float:
    """The sum of float64 tensors, one element after the other."""
    together = torch.cat(list(parts)).numpy()
    # ``accumulate`` adds in order; ``sum`` would add in pairs.
    return float(np.add.accumulate(together)[-1]) if together.size else 0.0


def _sum_of_stored(values: StoredValues) -> int:
    """Of where they come from, if that tells, or else as of values in memory."""
    if values.origin:
        return zlib.crc32(values.origin.encode())
    total = 0
    for _, piece in values.pieces(_SUMMED):
        total = crc32c(as_bytes(piece).numpy(), total)
    return total


def _sum_of(flat: torch.Tensor, before: int = 0) -> int:
    values = plain(flat.detach()).cpu().contiguous()
    return int(crc32c(as_bytes(values).numpy(), before)) if values.numel() else before
