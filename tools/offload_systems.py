"""The systems that ``bench_offload`` compares, each in a process of its own that trains on demand.

``python offload_systems.py JOB`` sets the system of a job (JSON, see ``Job``) up and takes a few
steps to warm up. For every line that it is sent it trains a block of steps, from idle to idle, and
prints a ``Sample`` as a line of JSON; it ends when its input does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed_config import zero3_on_nvme
from gpt import GPT

import infinity

BATCH_SEED = 1
WARM_STEPS = 3
"""The first step reads no moments and follows no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A system, and what it trains. ``system``: "plain", "ours:BUDGET", "serial:BUDGET" (without
    overlap) or "deepspeed". ``steps``: those of a block.
    """

    system: str
    nvme: list[str]
    width: int
    depth: int
    vocabulary: int
    batch: int
    tokens: int
    steps: int
    dtype: str
    device: str
    clip: float | None
    init: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def model(self, device: str) -> GPT:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        with torch.device(device):
            return GPT(
                width=self.width,
                depth=self.depth,
                vocabulary=self.vocabulary,
                tokens=self.tokens,
            )

    def batches(self) -> Iterator[torch.Tensor]:
        """Batches without end, the same every time."""
        generator = torch.Generator().manual_seed(BATCH_SEED)
        shape = (self.batch, self.tokens + 1)
        while True:
            batch = torch.randint(0, self.vocabulary, shape, generator=generator)
            yield batch.to(self.device)


@dataclass(slots=True)
class Block:
    """Seconds of each step of a block, of each part of a step (means), and the losses."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One block: seconds of each step, bytes moved in a step, peak resident bytes.

    ``phase_seconds``: the mean of each part of a step, as the program sees it.
    """

    system: str
    step_seconds: list[float]
    phase_seconds: dict[str, float]
    read_bytes: int = 0
    written_bytes: int = 0
    peak_bytes: int = 0
    overlap_seconds: float = 0.0
    stall_seconds: float = 0.0
    losses: list[float]


def main() -> None:
    """Train a block for every line of the input."""
    job = Job(**json.loads(sys.argv[1]))
    samples = _SYSTEMS[job.system.split(":")[0]](job)
    for _ in sys.stdin:
        print(json.dumps(asdict(next(samples))), flush=True)
    samples.close()


class Loop:
    """A training loop that is run in blocks. ``finish`` waits for what is still under way."""

    def __init__(
        self,
        job: Job,
        model: Callable[..., torch.Tensor],
        update: Callable[[], None],
        *,
        backward: Callable[[torch.Tensor], Any] = lambda loss: loss.backward(),
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches = job.batches()
        self._model = model
        self._update = update
        self._backward = backward
        self._finish = finish

    def run(self, steps: int) -> Block:
        """A block of steps, the last with what was still under way."""
        block = Block()
        for step, batch in enumerate(itertools.islice(self._batches, steps)):
            marks = [time.perf_counter()]
            loss = self._model(batch[:, :-1], batch[:, 1:])
            marks.append(time.perf_counter())
            self._backward(loss)
            marks.append(time.perf_counter())
            self._update()
            block.losses.append(loss.item())
            if step == steps - 1:
                self._finish()
            marks.append(time.perf_counter())
            block.step_seconds.append(marks[3] - marks[0])
            for name, (first, last) in zip(_PHASES, itertools.pairwise(marks), strict=True):
                mean = (last - first) / steps
                block.phase_seconds[name] = block.phase_seconds.get(name, 0.0) + mean
        return block


_PHASES = ("forward", "backward", "update")


def _plain(job: Job) -> Generator[Sample]:
    """In memory: weights in the compute dtype, float32 masters, fused AdamW."""
    model = job.model("cpu")
    masters = [p.detach().float().to(job.device).requires_grad_() for p in model.parameters()]
    model.to(job.device).to(job.torch_dtype)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def update() -> None:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        if job.clip:
            torch.nn.utils.clip_grad_norm_(masters, job.clip)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
                master.grad = None

    loop = Loop(job, model, update)
    loop.run(WARM_STEPS)
    while True:
        block = loop.run(job.steps)
        yield Sample(system=job.system, peak_bytes=peak_bytes(), **asdict(block))


def _ours(job: Job) -> Generator[Sample]:
    kind, budget = job.system.split(":")
    model = job.model("meta" if job.init == "meta" else "cpu")
    with infinity.offload(
        model,
        nvme=job.nvme,
        optimizer=infinity.AdamW(lr=1e-4),
        compute_dtype=job.torch_dtype,
        host_memory=budget,
        device=job.device,
        max_grad_norm=job.clip,
        overlap=kind == "ours",
    ) as offloaded:
        loop = Loop(job, model, lambda: offloaded.step(), finish=offloaded.flush)
        loop.run(WARM_STEPS)
        while True:
            before = offloaded.report()
            block = loop.run(job.steps)
            after = offloaded.report()
            yield Sample(
                system=job.system,
                **asdict(block),
                read_bytes=(after.read_bytes - before.read_bytes) // job.steps,
                written_bytes=(after.written_bytes - before.written_bytes) // job.steps,
                overlap_seconds=(after.overlap_seconds - before.overlap_seconds) / job.steps,
                stall_seconds=(after.stall_seconds - before.stall_seconds) / job.steps,
                peak_bytes=peak_bytes(),
            )


def _deepspeed(job: Job) -> Generator[Sample]:
    """ZeRO-3 with parameters and optimizer on NVMe, in the configuration its documentation
    advises.
    """
    import deepspeed

    # The one place where DeepSpeed looks for its process group.
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
    )
    with tempfile.TemporaryDirectory(dir=job.nvme[0]) as folder:
        config = zero3_on_nvme(folder, batch=job.batch, max_grad_norm=job.clip)
        engine, *_ = deepspeed.initialize(model=job.model("cpu"), config=config)
        loop = Loop(job, engine, engine.step, backward=engine.backward)
        loop.run(WARM_STEPS)
        while True:
            block = loop.run(job.steps)
            yield Sample(system=job.system, peak_bytes=peak_bytes(), **asdict(block))


_SYSTEMS = {"plain": _plain, "ours": _ours, "serial": _ours, "deepspeed": _deepspeed}


def peak_bytes() -> int:
    """Peak resident bytes of this process (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
