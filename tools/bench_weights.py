"""Weights from files into NVMe and out again, against what the disks can do.

A GPT's weights in bfloat16 are saved once as safetensors. Each round measures how fast the
directory of the files and that of NVMe read and write as many bytes (our engine, plain requests,
direct I/O), and times, in a process of its own that finds nothing in the page cache:

  in     `infinity.offload(model, weights=folder)` until all tiers are filled
  out    `offloaded.export(folder)`, beside the files that came in
  leave  the end of the block, which gives the model its values in new memory; writes nothing

The limit of each is the slower of what it reads and what it writes at those rates. Memory is the
most that was resident beyond what the process held before, mapped pages of files included, and
without the values themselves where a model gets them back. What comes out has to be what went in,
byte for byte.

    python tools/bench_weights.py --dir FILES [--dir NVME] [--budget 512MiB] [--json out.json]
    python tools/ssd_rig.py run --count 2 --limit 400MiB --size 5GiB -- \
        python tools/bench_weights.py --dir={}

Prints a table; with --json every sample. Nothing stays in the directories.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from disk_bandwidth import Way
from gpt import GPT
from host_rates import describe_machine
from offload_systems import peak_bytes
from safetensors import safe_open
from samples import as_text, extremes, ratios, seconds_of

import checkpoint
import infinity
from aio import Engine, Request, Slab
from swap.tiers import parse_bytes

PHASES = ("in", "out", "leave")
OPTIMIZERS = {"none": None, "adamw": infinity.AdamW(lr=1e-4)}
_REQUEST_BYTES = 4 << 20
_DRAWN = 1 << 20
"""So many values are drawn, and repeated."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds: of each phase its seconds, bytes, limit and memory."""
    files_in, nvme = options.dir[0], options.dir[-1]
    rounds = []
    with tempfile.TemporaryDirectory(prefix=".bench-weights-", dir=files_in) as folder:
        nbytes = save_model(options, Path(folder, "in"))
        for number in range(options.rounds):
            work: list[Callable[[], dict[str, Any]]] = [
                lambda: {"rates": measure_rates(folder, nvme, nbytes)},
                lambda: {"phases": one_process(options, folder)},
            ]
            made: dict[str, Any] = {}
            for part in work if number % 2 == 0 else work[::-1]:
                made |= part()
            rounds.append(with_limits(made["phases"], made["rates"]) | {"rates": made["rates"]})
    return {
        "machine": describe_machine(),
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "model_bytes": nbytes,
        "budget_bytes": parse_bytes(options.budget, name="--budget"),
        "rounds": rounds,
    }


def make_model(options: argparse.Namespace, device: str) -> GPT:
    with torch.device(device):
        model = GPT(
            width=options.width, depth=options.depth, vocabulary=options.vocabulary, tokens=1024
        )
        return model.bfloat16()


def save_model(options: argparse.Namespace, folder: Path) -> int:
    """Its bytes. Of no more than one shard of values there is ever a copy in memory."""
    drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = make_model(options, "meta")
    tensors = {name: _Repeated(p.shape, drawn) for name, p in model.named_parameters()}
    checkpoint.write_safetensors(tensors, folder, max_shard_bytes=options.shard_bytes)
    return sum(p.nbytes for p in model.parameters())


class _Repeated:
    """A byte source of the same values again and again."""

    dtype = torch.bfloat16
    thread_safe = True

    def __init__(self, shape: torch.Size, drawn: torch.Tensor) -> None:
        self.shape = tuple(shape)
        self._bytes = drawn.view(torch.uint8).numpy()

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``."""
        at = 0
        while at < len(out):
            first = (start + at) % self._bytes.size
            part = self._bytes[first : first + len(out) - at]
            out[at : at + part.size] = part.data
            at += part.size


def measure_rates(folder: str, nvme: str, nbytes: int) -> dict[str, float]:
    """Bytes a second of plain requests: reads of the files that go in, and of as many bytes in
    both places what else there is to do.
    """
    sources = sorted(Path(folder, "in").glob("*.safetensors"))
    with (
        tempfile.TemporaryDirectory(dir=folder) as here,
        tempfile.TemporaryDirectory(dir=nvme) as there,
    ):
        beside, swap = Path(here, "plain"), Path(there, "plain")
        return {
            "files write": _plain_rate("write", [beside], nbytes),
            "files read": _plain_rate("read", sources, 0),
            "nvme write": _plain_rate("write", [swap], nbytes),
            "nvme read": _plain_rate("read", [swap], 0),
        }


def _plain_rate(way: Way, paths: Sequence[Path], nbytes: int) -> float:
    """Of new files of ``nbytes``, synced, or of all that files have."""
    moved = 0
    with ExitStack() as stack:
        engine = stack.enter_context(Engine())
        slab = stack.enter_context(Slab(_REQUEST_BYTES))
        buffer = slab.allocate(_REQUEST_BYTES)
        mode = {"mode": "w", "size": nbytes} if way == "write" else {"mode": "r"}
        files = [stack.enter_context(engine.open(path, **mode)) for path in paths]
        started = time.perf_counter()
        for file in files:
            size = nbytes if way == "write" else file.path.stat().st_size
            requests = [
                Request(way, file, at, buffer[: min(_REQUEST_BYTES, size - at)])
                for at in range(0, size, _REQUEST_BYTES)
            ]
            for operation in engine.submit(requests):
                operation.result()
            if way == "write":
                file.sync()
            moved += size
        return moved / (time.perf_counter() - started)


def one_process(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What the phases took in a process of their own; the page cache holds nothing of the files."""
    forget_pages(Path(folder, "in"))
    worker = vars(options) | {"worker": folder}
    command = [sys.executable, __file__, "--worker", json.dumps(worker)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def forget_pages(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def work(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The phases, in this process."""
    model = make_model(options, "meta").to_empty(device="cpu")  # its memory is not touched
    out = Path(folder, "out")
    block = infinity.offload(
        model,
        nvme=options.dir[-1],
        weights=Path(folder, "in"),
        optimizer=OPTIMIZERS[options.optimizer],
        host_memory=options.budget,
    )
    gc.collect()
    held: list[infinity.OffloadedModel] = []
    found = {"in": _measured(lambda: held.append(block.__enter__()))}
    found["out"] = _measured(lambda: held[0].export(out))
    check_same_bytes(Path(folder, "in"), out)
    shutil.rmtree(out)
    found["leave"] = _measured(lambda: block.__exit__(None, None, None))
    return found


def _measured(call: Callable[[], object]) -> dict[str, Any]:
    before = _moved_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this call
    held = peak_bytes()
    seconds = seconds_of(call)
    read, written = (now - then for now, then in zip(_moved_bytes(), before, strict=True))
    return {
        "seconds": seconds,
        "read_bytes": read,
        "written_bytes": written,
        "memory_bytes": peak_bytes() - held,
    }


def _moved_bytes() -> tuple[int, int]:
    """Read and written by this process, to and from devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


def check_same_bytes(one: Path, other: Path) -> None:
    """Raises RuntimeError naming a tensor that differs."""
    here, there = tensors_in(one), tensors_in(other)
    for (name, tensor), (again, copy) in zip(here, there, strict=True):
        if name != again or not torch.equal(tensor.view(torch.int16), copy.view(torch.int16)):
            raise RuntimeError(f"{name} came out otherwise than it went in")
    forget_pages(one)


def tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """By name; each is let go of before the next is read."""
    found: dict[str, Path] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    for name in sorted(found):
        with safe_open(found[name], framework="pt") as file:
            yield name, file.get_tensor(name)


def with_limits(phases: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    """And the least seconds that each can take."""
    places = {"in": ("files", "nvme"), "out": ("nvme", "files"), "leave": ("nvme", "files")}
    for name, phase in phases.items():
        source, target = places[name]
        phase["limit_seconds"] = max(
            phase["read_bytes"] / rates[f"{source} read"],
            phase["written_bytes"] / rates[f"{target} write"],
        )
    return phases


def _print_table(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    rates = {
        key: statistics.median(one["rates"][key] for one in rounds) / 1e9
        for key in rounds[0]["rates"]
    }
    told = ", ".join(f"{key} {rate:.2f}" for key, rate in rates.items())
    print(f"{result['model_bytes'] / 1e9:.2f} GB of weights; GB/s of plain requests: {told}.")
    print("Medians (range); of the limit: 1 is as fast as the slower of reading and writing.")
    row = "{:<8}{:>22}{:>10}{:>10}{:>20}{:>12}{:>14}"
    print(row.format("", "s", "read", "written", "of the limit", "MiB more", "of the budget"))
    for name in PHASES:
        made = [one[name] for one in rounds]
        seconds = [one["seconds"] for one in made]
        memory = max(one["memory_bytes"] for one in made)
        memory -= result["model_bytes"] if name == "leave" else 0
        print(
            row.format(
                name,
                as_text(extremes(seconds), 3),
                f"{made[0]['read_bytes'] / 1e9:.2f}G",
                f"{made[0]['written_bytes'] / 1e9:.2f}G",
                as_text(extremes(ratios([one["limit_seconds"] for one in made], seconds)), 2),
                f"{memory / 2**20:.0f}",
                f"{memory / result['budget_bytes']:.2f}",
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--dir", action="append", default=[], help="for the files; given twice, the other for NVMe"
    )
    parser.add_argument("--budget", default="512MiB", help="host_memory")
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], default="none")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=18)
    parser.add_argument("--vocabulary", type=int, default=22528)
    parser.add_argument("--shard-bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write every sample there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        given = json.loads(options.worker)
        print(json.dumps(work(argparse.Namespace(**given), given["worker"])))
        return
    if not 1 <= len(options.dir) <= 2:
        parser.error("give --dir once or twice")
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
