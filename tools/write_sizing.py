"""Prints docs/SIZING.md: what training of usual sizes takes, by ``infinity.plan``.

python tools/write_sizing.py > docs/SIZING.md
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import infinity
from swap.storage.drives.endurance import DRIVE_ENDURANCE
from swap.tiers import format_bytes

BILLIONS = (7, 13, 70)
MEMORIES = (None, "32GiB", "64GiB", "128GiB")
"""Of the host, None for the least that works."""
_HEAD = f"""\
# Sizing

What full fine-tuning takes: weights in bfloat16, AdamW with masters and moments in float32, and
one process on the CPU, a backward pass before each step. Written by `tools/write_sizing.py`, which
asks `infinity.plan`, so nothing here is measured. A number of parameters stands for a transformer
with a vocabulary of 128,256; for your own: `infinity plan path/to/folder --host-memory 32GiB`.

| B | `host_memory` | NVMe at least | wanted | read a step | written a step | {DRIVE_ENDURANCE} |
|---|---|---|---|---|---|---|
"""
_TAIL = """
- *B*: parameters, in billions. The first row of each is the least budget that works. Activations,
  gradients on their way and the interpreter come beside it, see [TUNING.md](TUNING.md#training).
- *wanted*: with less than that, updates wait for the end of the backward pass.
- The last column: steps until a drive of that rating has taken what its maker vouches for; two
  drives last twice as long.
- Seconds of I/O in a step: bytes read / speed of reads + bytes written / speed of writes, which
  `infinity plan --nvme` measures.
- Moments in fewer bits, as `infinity.AdamW(state_dtype=torch.bfloat16)`, with all state on NVMe:

| moments of 7 B in | NVMe at least | read a step | written a step |
|---|---|---|---|
"""
_TILES = ("256MiB", "64MiB", "16MiB")
_TILED = f"""
- The least `host_memory` with `max_parameter_bytes`, which cuts large layers and embeddings into
  tiles, see [TUNING.md](TUNING.md#tiles); blocks that are recomputed have all of their Linears in
  memory, which is counted:

| B | whole | {" | ".join(_TILES)} |
|---|---|{"---|" * len(_TILES)}
"""


def page() -> str:
    rows = [row(count, memory) for count in BILLIONS for memory in MEMORIES]
    return _HEAD + "".join(rows) + _TAIL + "".join(_moments()) + _TILED + "".join(_tiled())


def _plan(billions: int, memory: str | None, dtype: torch.dtype = torch.float32) -> infinity.Plan:
    count, optimizer = billions * 10**9, infinity.AdamW(state_dtype=dtype)
    least = infinity.plan(count, host_memory=1, optimizer=optimizer, device="cpu").least_host_bytes
    return infinity.plan(count, host_memory=memory or least, optimizer=optimizer, device="cpu")


def row(billions: int, memory: str | None) -> str:
    plan = _plan(billions, memory)
    steps = "no end" if not plan.written_bytes_per_step else f"{plan.wear.steps:,.0f}"
    cells = [
        str(billions),
        format_bytes(plan.budget_host_bytes),
        format_bytes(plan.nvme_bytes),
        format_bytes(plan.nvme_wanted_bytes),
        format_bytes(plan.read_bytes_per_step),
        format_bytes(plan.written_bytes_per_step),
        steps,
    ]
    return f"| {' | '.join(cells)} |\n"


def _moments() -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        plan = _plan(7, None, dtype)
        sizes = (plan.nvme_bytes, plan.read_bytes_per_step, plan.written_bytes_per_step)
        name = str(dtype).removeprefix("torch.")
        yield f"| {name} | {' | '.join(map(format_bytes, sizes))} |\n"


def _tiled() -> Iterator[str]:
    for billions in BILLIONS:
        plans = [
            infinity.plan(billions * 10**9, host_memory=1, device="cpu", max_parameter_bytes=tile)
            for tile in (None, *_TILES)
        ]
        sizes = [format_bytes(plan.least_host_bytes) for plan in plans]
        yield f"| {billions} | {' | '.join(sizes)} |\n"


if __name__ == "__main__":
    print(page(), end="")
