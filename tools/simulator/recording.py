"""A step of a real model as a trace: what it uses and computes in which order, and for how long.

The model is in memory and plain; watching it costs a few microseconds for each module and tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.parameters.records import least_arena_bytes, records_of
from simulator.trace import Op, Phase, Trace


def record(model: nn.Module, step: Callable[[], None]) -> Trace:
    """Run ``step``, one forward and one backward pass of ``model``, and note what happens.

    Parameters must be on the CPU, where nothing is computed behind the program's back.
    """
    records = records_of(model, None)
    watch = _Watch({record.parameter.data_ptr(): record.index for record in records})
    with ExitStack() as stack:
        for module in model.modules():
            mine = {id(p) for p in module.parameters(recurse=False)}
            indices = tuple(r.index for r in records if id(r.parameter) in mine)
            if indices:
                stack.enter_context(watch.module(module, indices))
        for entry in records:
            if entry.parameter.requires_grad:
                handle = entry.parameter.register_post_accumulate_grad_hook(
                    watch.gradient(entry.index)
                )
                stack.callback(handle.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack))
        watch.since = time.perf_counter()
        step()
        watch.close(Op(phase="backward"))
    return Trace(
        specs=tuple(record.spec for record in records),
        rows=tuple(r.numel // max(1, r.shape[0]) if r.shape else 1 for r in records),
        block_bytes=least_arena_bytes(model, records),
        ops=tuple(watch.ops),
    )


@dataclass(slots=True)
class _Weight:
    """Stands for a saved tensor that is a parameter, or a view of one."""

    index: int
    tensor: torch.Tensor


@dataclass(slots=True)
class _Watch:
    """``parameters`` are indices by address. An op lasts from the one before to the next use."""

    parameters: dict[int, int]
    ops: list[Op] = field(default_factory=list)
    since: float = 0.0
    uses: tuple[int, ...] = ()
    phase: Phase = "forward"

    def close(self, op: Op) -> None:
        """What was computed up to now is an op with these gradients and the uses noted before."""
        now = time.perf_counter()
        self.ops.append(
            Op(phase=self.phase, uses=self.uses, gradients=op.gradients, seconds=now - self.since)
        )
        self.since, self.uses = now, ()

    @contextmanager
    def module(self, module: nn.Module, indices: tuple[int, ...]) -> Iterator[None]:
        def begins(*_: Any) -> None:
            self.close(Op(phase=self.phase))
            self.uses = indices

        handle = module.register_forward_pre_hook(begins)
        try:
            yield
        finally:
            handle.remove()

    def gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            self._turn()
            self.close(Op(phase="backward", gradients=(index,)))

        return arrived

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Weight:
        index = self.parameters.get(tensor.data_ptr())
        return tensor if index is None else _Weight(index, tensor)

    def unpack(self, packed: torch.Tensor | _Weight) -> torch.Tensor:
        self._turn()
        if isinstance(packed, torch.Tensor):
            return packed
        self.close(Op(phase="backward"))
        self.uses = (packed.index,)
        return packed.tensor

    def _turn(self) -> None:
        """The first sign of a backward pass ends the forward pass."""
        if self.phase == "forward":
            self.close(Op(phase="forward"))
            self.phase = "backward"
