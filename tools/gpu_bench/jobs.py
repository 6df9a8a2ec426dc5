"""What the systems of ``bench_gpu`` train: the same model from the same values on the same batches.

First values are drawn on the device, by a seed: for billions of parameters a CPU takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpt import GPT

LR = 1e-4
_SEED = 1
_SPREAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A system, and what it trains; bytes, tokens and rows are counts.

    ``system``: "memory", "offloaded" or "deepspeed". ``sequence``: tokens of one sequence; how many
    of these are in a batch is asked for with each block. ``host_memory`` and ``device_memory`` are
    budgets of what is offloaded.
    """

    system: str
    nvme: list[str]
    width: int
    depth: int
    vocabulary: int
    sequence: int
    rows: int
    dtype: str
    device: str
    clip: float
    host_memory: int = 0
    device_memory: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def skeleton(self) -> GPT:
        """The model without values."""
        with torch.device("meta"):
            model = GPT(
                width=self.width,
                depth=self.depth,
                vocabulary=self.vocabulary,
                tokens=self.sequence,
                recompute_rows=self.rows,
            )
        return model.to(self.torch_dtype)

    def model(self) -> GPT:
        """The model on the device, with the same values every time."""
        model = self.skeleton().to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(_SEED)
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, _SPREAD, generator=generator)
                else:
                    parameter.fill_(float("norm" in name and name.endswith("weight")))
        return model

    def batches(self, sequences: int, first: int = 0) -> Iterator[torch.Tensor]:
        """Batches without end, from number ``first``; the same every time."""
        shape = (sequences, self.sequence + 1)
        number = first
        while True:
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(0, self.vocabulary, shape, generator=generator).to(self.device)
            number += 1
