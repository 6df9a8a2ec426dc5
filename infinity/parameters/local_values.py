"""Values of offloaded parameters as real tensors, and back: those that this rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

import torch

from aio import AioError
from infinity.parameters.records import Record
from swap.interruptions.apart import run_apart
from swap.interruptions.mixture import Scope
from swap.plain import bits_of, check_memory
from swap.tiered import TieredState


def weight_of(state: TieredState, record: Record) -> torch.Tensor:
    """A copy of the weights, in the shape of what this rank keeps, on the compute device."""
    weight = torch.empty(record.spec.numel, dtype=record.spec.dtype, device="cpu")
    state.components.read(record.index, "weight", 0, weight)
    return weight.view(record.kept_shape).to(state.device)


def write_back(state: TieredState, records: Iterable[Record]) -> Callable[[], None]:
    """Take what a program made of the weights of ``records``, of all or, where one cannot be
    written, of none; what is returned puts back what there was before, or raises ``AioError`` and
    leaves it mixed.
    """
    with ExitStack() as put_back:
        for record in records:
            put_back.callback(_write_back(state, record))
        return put_back.pop_all().close


def _write_back(state: TieredState, record: Record) -> Callable[[], None]:
    """``write_back`` of one.

    Elements of which a bit was changed become the master exactly; the others keep the master's low
    bits. Raises ``AioError`` when they cannot be written. What there was is put back then; where
    that fails, too, it is mixed.
    """
    before = weight_of(state, record).view(-1)
    kept = slice(record.first, record.first + record.spec.numel)
    check_memory(f"the value of {record.name}", record.parameter.data)
    after = record.parameter.data.reshape(-1)[kept].to(before.dtype)
    changed = (bits_of(before) != bits_of(after)).any(1)
    if not changed.any():
        return lambda: None
    master = state.read_values(record.index, 0, record.spec.numel)
    values = torch.where(changed.cpu(), after.cpu().to(master.dtype), master)
    # An interrupt comes before or after.
    run_apart(partial(_fill, state, record, values, before=master), "infinity-modify")
    return partial(run_apart, partial(_fill, state, record, master), "infinity-modify")


def _fill(
    state: TieredState,
    record: Record,
    values: torch.Tensor,
    *,
    before: torch.Tensor | None = None,
) -> None:
    with state.mixture.changing(f"keeping what gathered() changed of {record.name}") as change:
        change.begin(Scope(values=frozenset({record.index})))
        try:
            state.fill(record.index, values)
        except AioError:
            if before is not None:
                state.fill(record.index, before)
                change.undone()
            raise
        finally:
            state.weights.drop()


def read_values(state: TieredState, record: Record, out: torch.Tensor) -> None:
    """Fill ``out``, contiguous, with what was computed with, or the master where that says more."""
    if record.dtype == record.spec.dtype and out.device.type == "cpu":
        state.components.read(record.index, "weight", 0, out.view(-1))
    elif record.dtype == record.spec.dtype:
        out.copy_(weight_of(state, record))
    else:
        state.read_all(record.index, out.view(-1))
