"""What a step does, in its order: which weights are used, what is computed, which gradients come.

A trace is recorded from a real model on the device that it trains on (``recording.py``) or made up
for a transformer that is not there (``transformer.py``). Parameters are named by their index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from swap.plan.layout import ParameterSpec

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A stretch of computing. Before it ``uses`` must be there; after it come ``gradients``.

    It takes ``seconds`` on the machine that it was recorded on; ``flops`` are what a made-up one
    computes. ``activation_bytes`` leave for where activations are kept in a forward pass, and come
    back in a backward pass.
    """

    phase: Phase
    uses: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    seconds: float = 0.0
    flops: float = 0.0
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One forward and one backward pass over parameters, which are whole here.

    ``rows`` are the elements in the last dimensions of each parameter, at which ranks cut it.
    ``block_bytes`` are the weights that are at work at once: the largest block and a module more.
    """

    specs: tuple[ParameterSpec, ...]
    rows: tuple[int, ...]
    block_bytes: int
    ops: tuple[Op, ...]

    @property
    def num_parameters(self) -> int:
        return sum(spec.numel for spec in self.specs)

    def seconds(self, phase: Phase) -> float:
        """Recorded seconds of all that is computed in a phase."""
        return sum(op.seconds for op in self.ops if op.phase == phase)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)

    def scaled(self, seconds: Mapping[str, float]) -> Trace:
        """The same with so many seconds in each phase: a recorded step has the right proportions,
        and a longer measurement the right sum.
        """
        factors = {phase: seconds[phase] / self.seconds(phase) for phase in _PHASES}
        ops = (
            Op(
                phase=op.phase,
                uses=op.uses,
                gradients=op.gradients,
                seconds=op.seconds * factors[op.phase],
                flops=op.flops,
                activation_bytes=op.activation_bytes,
            )
            for op in self.ops
        )
        return Trace(specs=self.specs, rows=self.rows, block_bytes=self.block_bytes, ops=tuple(ops))

    def as_json(self) -> dict[str, Any]:
        return {
            "parameters": [
                {**asdict(spec), "dtype": str(spec.dtype).removeprefix("torch."), "row": row}
                for spec, row in zip(self.specs, self.rows, strict=True)
            ],
            "block_bytes": self.block_bytes,
            "ops": [asdict(op) for op in self.ops],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trace:
        """The inverse of ``as_json``; raises ``ValueError`` for what is none."""
        try:
            specs, rows = zip(*(_spec(entry) for entry in values["parameters"]), strict=True)
            ops = tuple(_op(entry) for entry in values["ops"])
            trace = cls(specs=specs, rows=rows, block_bytes=int(values["block_bytes"]), ops=ops)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no recorded trace: {error!r}") from error
        known = range(len(trace.specs))
        if any(index not in known for op in ops for index in (*op.uses, *op.gradients)):
            raise ValueError("this is no recorded trace: it uses parameters that it does not have")
        return trace


_PHASES: tuple[Phase, ...] = ("forward", "backward")


def _spec(entry: Mapping[str, Any]) -> tuple[ParameterSpec, int]:
    values = dict(entry)
    row = int(values.pop("row"))
    dtype = getattr(torch, values.pop("dtype"))
    return ParameterSpec(**values, dtype=dtype), row


def _op(entry: Mapping[str, Any]) -> Op:
    values = dict(entry)
    for name in ("uses", "gradients"):
        values[name] = tuple(values[name])
    if values["phase"] not in _PHASES:
        raise ValueError(f"phase {values['phase']!r} of an op is neither of {_PHASES}")
    return Op(**values)
