"""The systems that ``bench_inference`` compares, each in a process of its own that works on demand.

``python inference_systems.py JOB`` sets the system of a job (JSON, see ``Job``) up and makes one
pass. For every line that it is sent it makes one more, and prints a ``Pass`` as a line of JSON; it
ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import (  # type: ignore[import-untyped]
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from offload_systems import peak_bytes
from transformers import AutoConfig, AutoModelForCausalLM

import infinity

PROMPT_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A system, and what it computes. ``system``: "plain", "ours:BUDGET" or "accelerate".

    A pass takes ``batch`` rows of ``tokens`` tokens through the model; with ``generate``, it
    continues them by so many tokens, each of which is a pass through the model, and its time is
    that of one token.
    """

    system: str
    model: str
    nvme: list[str]
    batch: int
    tokens: int
    generate: int

    def prompt(self, vocabulary: int) -> torch.Tensor:
        """The same rows every time."""
        generator = torch.Generator().manual_seed(PROMPT_SEED)
        return torch.randint(0, vocabulary, (self.batch, self.tokens), generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Seconds, bytes read by our engine, peak resident bytes of the passes so far, and a sum over
    what came out.
    """

    seconds: float
    read_bytes: int
    peak_bytes: int
    crc: int


@torch.no_grad()
def main() -> None:
    """Make a pass for every line of the input."""
    job = Job(**json.loads(sys.argv[1]))
    with _SYSTEMS[job.system.split(":")[0]](job) as (model, offloaded):
        prompt = job.prompt(model.config.vocab_size)
        _output(job, model, prompt)  # the first pass records what the next ones follow
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of passes, not of loading
        for _ in sys.stdin:
            _forget_pages(job.nvme[0])
            read = 0 if offloaded is None else offloaded.report().read_bytes
            started = time.perf_counter()
            made = _output(job, model, prompt)
            seconds = (time.perf_counter() - started) / (job.generate or 1)
            if offloaded is not None:
                read = (offloaded.report().read_bytes - read) // (job.generate or 1)
            crc = zlib.crc32(made.contiguous().view(torch.uint8).numpy().data)
            one = Pass(seconds=seconds, read_bytes=read, peak_bytes=peak_bytes(), crc=crc)
            print(json.dumps(asdict(one)), flush=True)


def _output(job: Job, model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits, or the rows with their continuations."""
    if not job.generate:
        logits: torch.Tensor = model(input_ids=prompt, use_cache=False).logits
        return logits
    mask = torch.ones_like(prompt)
    new = {"min_new_tokens": job.generate, "max_new_tokens": job.generate}
    rows: torch.Tensor = model.generate(prompt, attention_mask=mask, do_sample=False, **new)
    return rows


def _forget_pages(folder: str) -> None:
    """Weights come from the disk, and not from the page cache, which no budget counts."""
    for path in Path(folder).rglob("*.dat"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are to be written yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _empty(job: Job) -> Any:
    config = AutoConfig.from_pretrained(job.model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@contextlib.contextmanager
def _plain(job: Job) -> Iterator[tuple[Any, None]]:
    """All in memory."""
    yield AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval(), None


@contextlib.contextmanager
def _ours(job: Job) -> Iterator[tuple[Any, infinity.OffloadedModel]]:
    model = _empty(job).requires_grad_(False)
    budget = job.system.partition(":")[2]
    with infinity.offload(
        model, job.nvme, weights=job.model, optimizer=None, host_memory=budget
    ) as offloaded:
        yield model, offloaded


@contextlib.contextmanager
def _accelerate(job: Job) -> Iterator[tuple[Any, None]]:
    """Every layer on the disk, fetched by the module that uses it."""
    config = AutoConfig.from_pretrained(job.model)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    places = dict.fromkeys(("model.embed_tokens", "lm_head"), "disk")
    places |= {f"model.layers.{number}": "disk" for number in range(config.num_hidden_layers)}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}  # something has to be in memory
    with tempfile.TemporaryDirectory(dir=job.nvme[0]) as folder:
        yield load_checkpoint_and_dispatch(model, job.model, places, offload_folder=folder), None


_SYSTEMS: dict[str, Callable[[Job], AbstractContextManager[tuple[Any, Any]]]] = {
    "plain": _plain,
    "ours": _ours,
    "accelerate": _accelerate,
}


if __name__ == "__main__":
    main()
