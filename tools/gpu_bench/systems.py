"""Systems that train: with everything in device memory, offloaded, and DeepSpeed.

Each answers requests: ``bits`` trains from the first values and says what came of it bit by bit,
``block`` times steps, ``copies`` looks at those between host and device during a few steps.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed_config import zero3_on_host
from gpt import GPT

import infinity
from gpu_bench.checksums import checksum
from gpu_bench.copies import copies_during
from gpu_bench.exact_adamw import Options
from gpu_bench.in_memory import ExactUpdate, FusedUpdate, MakeUpdate
from gpu_bench.jobs import LR, Job
from gpu_bench.link_rates import synchronize
from gpu_bench.peaks import device_peaks, host_bytes, host_peak_bytes, reset_peaks

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``do``: "bits", "block" or "copies"; ``sequences`` in each batch, one batch a step."""

    do: str
    sequences: int
    steps: int


class System(Protocol):
    """Something that trains."""

    def answer(self, request: Request) -> Answer:
        """Do what is asked."""


@contextmanager
def opened(job: Job) -> Iterator[System]:
    """The system of a job, until the end of the block."""
    # Before the first product: torch refuses deterministic ones of cuBLAS without.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _warm(job)
    with ExitStack() as stack:
        yield _SYSTEMS[job.system](job, stack)


@contextmanager
def deterministic() -> Iterator[None]:
    """The same bits in every run: the backward pass of attention adds up in any order otherwise,
    and products may be split by what workspace there is.
    """
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it takes time alone
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


class Trained:
    """A model with what updates it. ``finish`` waits for what a step left under way."""

    def __init__(
        self,
        job: Job,
        model: Callable[..., torch.Tensor],
        update: Callable[[], object],
        *,
        backward: Callable[[torch.Tensor], object] = lambda loss: loss.backward(),
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._job = job
        self._model = model
        self._update = update
        self._backward = backward
        self._finish = finish
        self._num_batches = 0

    def losses(self, request: Request) -> list[float]:
        """Train, and wait until all is done."""
        losses = [self._step(batch) for batch in self._batches(request.sequences, request.steps)]
        self._finish()
        return [loss.item() for loss in losses]

    def block(self, request: Request) -> Answer:
        """Seconds of a step, from the end of one to the end of another: what a step leaves under
        way is within, as that of the step before is. A step comes before what is timed.
        """
        first, *batches = self._batches(request.sequences, 1 + request.steps)
        reset_peaks(self._job.device)
        self._step(first)
        self._wait_for_compute()
        started = time.perf_counter()
        losses = [self._step(batch) for batch in batches]
        self._wait_for_compute()
        seconds = (time.perf_counter() - started) / request.steps
        self._finish()
        answer = {
            "step_seconds": seconds,
            "tokens_per_second": request.sequences * self._job.sequence / seconds,
            "losses": [loss.item() for loss in losses],
            "device_peaks": device_peaks(self._job.device),
            "host_peak_bytes": host_peak_bytes(),
        }
        self._make_room()
        return answer

    def copies(self, request: Request) -> Answer:
        """Of the copies during some steps."""

        def work() -> None:
            self.losses(request)
            synchronize(self._job.device)

        return {"copies": copies_during(work, self._job.device)}

    def _step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self._model(batch[:, :-1], batch[:, 1:])
        self._backward(loss)
        self._update()
        return loss.detach()

    def _batches(self, sequences: int, count: int) -> list[torch.Tensor]:
        first, self._num_batches = self._num_batches, self._num_batches + count
        return list(itertools.islice(self._job.batches(sequences, first), count))

    def _wait_for_compute(self) -> None:
        if self._job.device != "cpu":
            torch.cuda.current_stream().synchronize()

    def _make_room(self) -> None:
        """For another process on the device, whose turn it is."""
        if self._job.device != "cpu":
            torch.cuda.empty_cache()


class Memory:
    """Everything in device memory: by ``ExactUpdate`` for bits, by ``FusedUpdate`` for time."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self._job = job
        self._timed: Trained | None = None

    def answer(self, request: Request) -> Answer:
        if request.do == "bits":
            return self._bits(request)
        if self._timed is None:
            self._timed, _ = self._trained(FusedUpdate)
        return self._timed.block(request)

    def _bits(self, request: Request) -> Answer:
        with deterministic():
            trained, model = self._trained(ExactUpdate)
            losses = trained.losses(request)
        weights = [checksum(parameter) for parameter in model.parameters()]
        del trained, model
        gc.collect()
        if self._job.device != "cpu":
            torch.cuda.empty_cache()
        return {"losses": losses, "weights": weights}

    def _trained(self, make: MakeUpdate) -> tuple[Trained, GPT]:
        model = self._job.model()
        parameters = list(model.parameters())
        update = make(parameters, Options(lr=LR), self._job.clip)
        return Trained(self._job, model, update), model


class Offloaded:
    """The model offloaded within the job's budgets."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        self._job = job
        self._model = model = job.model()
        self._host_bytes = host_bytes()
        self._offloaded = stack.enter_context(
            infinity.offload(
                model,
                job.nvme,
                optimizer=infinity.AdamW(lr=LR),
                device=job.device,
                compute_dtype=job.torch_dtype,
                device_memory=job.device_memory,
                host_memory=job.host_memory,
                max_grad_norm=job.clip,
            )
        )
        offloaded = self._offloaded
        self._trained = Trained(job, model, offloaded.step, finish=offloaded.flush)
        if job.device != "cpu":
            torch.cuda.empty_cache()  # which the model had its values in

    def answer(self, request: Request) -> Answer:
        if request.do == "bits":
            with deterministic():
                losses = self._trained.losses(request)
            return {"losses": losses, "weights": self._weights()}
        if request.do == "copies":
            return self._trained.copies(request)
        before = self._offloaded.report()
        answer = self._trained.block(request)
        after = self._offloaded.report()
        steps = 1 + request.steps
        return answer | {
            "read_bytes": (after.read_bytes - before.read_bytes) // steps,
            "written_bytes": (after.written_bytes - before.written_bytes) // steps,
            "stall_seconds": (after.stall_seconds - before.stall_seconds) / steps,
            "kernel_seconds": (after.kernel_seconds - before.kernel_seconds) / steps,
            "planned_bytes": dict(after.planned_bytes),
            "budget_host_bytes": self._job.host_memory,
            "counted_host_bytes": after.peak_host_bytes,
            "budget_device_bytes": self._job.device_memory,
            "host_bytes_before": self._host_bytes,
        }

    def _weights(self) -> list[str]:
        found = []
        for parameter in self._model.parameters():
            with self._offloaded.gathered([parameter]):
                found.append(checksum(parameter))
        return found


class DeepSpeed:
    """ZeRO-3 with parameters and optimizer in host memory."""

    def __init__(self, job: Job, stack: ExitStack) -> None:
        import deepspeed

        # The one place where DeepSpeed looks for its process group.
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
        )
        model = job.model().cpu()
        largest = max(parameter.numel() for parameter in model.parameters())
        config = zero3_on_host(lr=LR, max_grad_norm=job.clip, largest_parameter=largest)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        self._trained = Trained(job, engine, engine.step, backward=engine.backward)

    def answer(self, request: Request) -> Answer:
        return self._trained.block(request)


def _warm(job: Job) -> None:
    """Have the device's libraries loaded, whose memory is no system's."""
    model = torch.nn.Linear(64, 64, device=job.device, dtype=job.torch_dtype)
    model(torch.ones(64, 64, device=job.device, dtype=job.torch_dtype)).float().sum().backward()
    synchronize(job.device)


_SYSTEMS: dict[str, Callable[[Job, ExitStack], System]] = {
    "memory": Memory,
    "offloaded": Offloaded,
    "deepspeed": DeepSpeed,
}
