"""Values of offloaded parameters as real tensors, and back: those that this rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from aio import AioError
from aio.errors import is_no_room
from infinity.parameters.records import Record
from swap.interruptions.apart import run_apart
from swap.interruptions.mixture import Change, Scope
from swap.plain import bits_of, check_memory, same_bits
from swap.tiered import TieredState


def weight_of(state: TieredState, record: Record) -> torch.Tensor:
    """A copy of the weights, in the shape of what this rank keeps, on the compute device."""
    return _flat_weight(state, record).view(record.kept_shape).to(state.device)


def _flat_weight(state: TieredState, record: Record) -> torch.Tensor:
    weight = torch.empty(record.spec.numel, dtype=record.spec.dtype, device="cpu")
    state.components.read(record.index, "weight", 0, weight)
    return weight


@dataclass(frozen=True, slots=True)
class _Before:
    """What there was of one that is changed."""

    record: Record
    weight: torch.Tensor
    master: torch.Tensor

    def is_put_back(self, state: TieredState) -> bool:
        """What has no room to be written (to a copy, where a snapshot has the old) is not changed,
        and cannot be put back either.
        """
        try:
            self.put_back(state)
        except AioError as error:
            return is_no_room(error) and self._is_there(state)
        return True

    def put_back(self, state: TieredState) -> None:
        state.fill(self.record.index, self.master)

    def _is_there(self, state: TieredState) -> bool:
        master = state.read_values(self.record.index, 0, self.master.numel())
        weight = _flat_weight(state, self.record)
        return same_bits(master, self.master) and same_bits(weight, self.weight)


def write_back(state: TieredState, records: Sequence[Record]) -> Callable[[], None]:
    """Take what a program made of the weights of ``records``, of all or, where one cannot be
    written, of none; what is returned puts back what there was before.

    Elements of which a bit was changed become the master exactly; the others keep the master's low
    bits. Raises ``AioError`` when they cannot be written. What there was is put back then; where
    that fails, too, all of them are mixed. An interrupt comes before or after.
    """
    before: list[_Before] = []
    run_apart(partial(_take, state, records, before), "infinity-modify")
    return partial(run_apart, partial(_give_back, state, records, before), "infinity-modify")


@contextmanager
def _changing(state: TieredState, records: Sequence[Record]) -> Iterator[Change]:
    state.mixture.check()  # this does not replace all of what was stopped
    names = records[0].name + (" (and other tiles)" if len(records) > 1 else "")
    with state.mixture.changing(f"keeping what gathered() changed of {names}") as change:
        change.begin(Scope(values=frozenset(record.index for record in records)))
        try:
            yield change
        finally:
            state.weights.drop()


def _take(state: TieredState, records: Sequence[Record], before: list[_Before]) -> None:
    """``before`` gets what there was of those that are changed."""
    with _changing(state, records) as change:
        try:
            for record in records:
                weight = _flat_weight(state, record)
                kept = slice(record.first, record.first + record.spec.numel)
                check_memory(f"the value of {record.name}", record.parameter.data)
                after = record.parameter.data.reshape(-1)[kept].to(weight.dtype).cpu()
                changed = (bits_of(weight) != bits_of(after)).any(1)
                if changed.any():
                    master = state.read_values(record.index, 0, record.spec.numel)
                    before.append(_Before(record, weight, master))
                    values = torch.where(changed, after.to(master.dtype), master)
                    state.fill(record.index, values)
        except Exception:  # of whatever kind
            if _are_put_back(state, before):
                change.undone()
            raise


def _are_put_back(state: TieredState, before: Sequence[_Before]) -> bool:
    try:
        return all(one.is_put_back(state) for one in before)
    except Exception:  # of whatever kind: it is mixed, and what came first is on its way
        return False


def _give_back(state: TieredState, records: Sequence[Record], before: Sequence[_Before]) -> None:
    with _changing(state, records):
        for one in before:
            one.put_back(state)


def read_values(state: TieredState, record: Record, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, with what was computed with, or the master where that says more."""
    if record.dtype == record.spec.dtype and out.device.type == "cpu":
        state.components.read(record.index, "weight", 0, out.view(-1))
    elif record.dtype == record.spec.dtype:
        out.copy_(weight_of(state, record))
    else:
        state.read_all(record.index, out.view(-1))
