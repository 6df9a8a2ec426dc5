"""Checkpoints of several ranks, each with an SSD of its own, beside what the SSDs give.

Every rank is a process with its own directory and its own rows of every tensor, as under FSDP. All
ranks of a row of the table save one checkpoint together (``checkpoint.save(..., coordinator=,
stripe_dirs=)``, durable when it returns) and load it again, every rank what it has, verified. One
set of processes does all rows, which take turns, so that a noisy neighbour hits all alike; ranks
that a row has no use for wait.

    python tools/ssd_rig.py run --count 4 --size 3GiB --limit 400MiB --preallocate -- \\
        python tools/bench_ranks.py --dir={} --limit 400MiB [--json out.json]

A row takes from the moment when all its ranks were ready until the last of them was done. `--limit`
is what one SSD gives, in bytes a second; without it no ratios are printed. Nothing stays in the
directories.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_ranks import Job, be_rank, run_ranks
from samples import extremes
from ssd_rig import parse_size

import checkpoint

ROW_ELEMENTS = 4096
TENSOR_BYTES = 64 << 20
"""Of one rank's rows of a tensor."""


class Rows:
    """The rows that this rank has of a tensor whose rows are shared out evenly: what it saves, and
    what it loads.
    """

    dtype = torch.float32

    def __init__(self, own: torch.Tensor, rank: int, world_size: int) -> None:
        self.shape = (own.shape[0] * world_size, own.shape[1])
        self.ranges = ((rank * own.numel(), own.numel()),)
        self._first_byte = rank * own.nbytes
        self._bytes = own.view(-1).view(torch.uint8)

    def read(self, start: int, out: memoryview) -> None:
        first = start - self._first_byte
        torch.frombuffer(out, dtype=torch.uint8).copy_(self._bytes[first : first + len(out)])

    def write(self, start: int, data: memoryview) -> None:
        low = max(start, self._first_byte)
        high = min(start + len(data), self._first_byte + self._bytes.numel())
        if low < high:
            given = torch.frombuffer(data[low - start : high - start], dtype=torch.uint8)
            self._bytes[low - self._first_byte : high - self._first_byte].copy_(given)


class Rank:
    """One rank of all rows: its tensors, and the group of each number of ranks that it is in."""

    def __init__(self, job: Job) -> None:
        arguments = job.arguments
        self.rank = job.rank
        self.directories = [Path(directory) for directory in arguments["directories"]]
        self._groups: dict[int, Any] = {}
        for count in arguments["counts"]:
            group = dist.new_group(range(count))
            if self.rank < count:
                self._groups[count] = (group, checkpoint.GroupCoordinator(group))
        rows = TENSOR_BYTES // (4 * ROW_ELEMENTS)
        generator = torch.Generator().manual_seed(self.rank)
        self.tensors = [
            torch.rand(rows, ROW_ELEMENTS, generator=generator)
            for _ in range(arguments["bytes"] // TENSOR_BYTES)
        ]
        self._sums = [tensor.view(torch.int32).sum().item() for tensor in self.tensors]

    def measure(self, count: int, number: int) -> dict[str, Any] | None:
        """One row: seconds of a save and a load, and the bytes that each rank wrote."""
        if count not in self._groups:
            return None
        group, coordinator = self._groups[count]
        path = self.directories[0] / f"row-{count}-{number}"
        own = {
            f"layer-{k}": Rows(tensor, self.rank, count) for k, tensor in enumerate(self.tensors)
        }
        state = {"model": own, "step": number}
        stripes = [self.directories[self.rank]]
        saved = timed(
            group,
            lambda: checkpoint.save(state, path, stripe_dirs=stripes, coordinator=coordinator),
        )
        for tensor in self.tensors:
            tensor.zero_()
        loaded = timed(group, lambda: checkpoint.load(path, into={"model": own}))
        found = [tensor.view(torch.int32).sum().item() for tensor in self.tensors]
        if found != self._sums:
            raise SystemExit(f"rank {self.rank}: what was loaded is not what was saved")
        written = bytes_by_rank(path)
        dist.barrier(group)
        if self.rank == 0:
            remove(path)
        dist.barrier(group)
        return {"save": saved, "load": loaded, "written": written}


def timed(group: Any, work: Callable[[], object]) -> dict[str, Any]:
    """Seconds from when all ranks were ready to when the last was done, and CPU seconds of each."""
    dist.barrier(group)
    started, used = time.monotonic(), time.process_time()
    work()
    # One clock for all: the ranks are on one machine.
    own = torch.tensor([started, time.monotonic(), time.process_time() - used], dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return {
        "seconds": max(t[1].item() for t in every) - min(t[0].item() for t in every),
        "cpu seconds": [t[2].item() for t in every],
    }


def bytes_by_rank(path: Path) -> list[int]:
    """Bytes of the data files of each rank of a checkpoint, from its manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    found: dict[int, int] = {}
    for file in manifest["files"]:
        rank = int(Path(file["path"]).name.partition("-")[0].removeprefix("r"))
        found[rank] = found.get(rank, 0) + int(file["nbytes"])
    return [found[rank] for rank in sorted(found)]


def remove(path: Path) -> None:
    """A checkpoint, its data wherever they are."""
    roots = json.loads((path / "manifest.json").read_text())["roots"]
    shutil.rmtree(path)
    for root in roots:
        for folder in Path(root).glob(f"{path.name}.*"):
            shutil.rmtree(folder)


def work(job: Job) -> list[Any]:
    """All rounds of one rank; on rank 0, what it saw."""
    rank = Rank(job)
    rounds = []
    for number in range(job.arguments["rounds"] + 1):
        counts = job.arguments["counts"]
        order = counts if number % 2 == 0 else counts[::-1]
        row = {}
        for count in order:
            dist.barrier()
            row[str(count)] = rank.measure(count, number)
        rounds.append(row)
    return rounds[1:] if job.rank == 0 else []  # the first one warms up


def summary(rounds: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of ranks: medians and ranges over the rounds."""
    rows = []
    for count in options.ranks:
        seen = [each[str(count)] for each in rounds]
        written = seen[0]["written"]
        row: dict[str, Any] = {
            "ranks": count,
            "bytes": sum(written),
            "largest over mean": max(written) * count / sum(written),
            "smallest over mean": min(written) * count / sum(written),
        }
        for name in ("save", "load"):
            seconds = [each[name]["seconds"] for each in seen]
            row[name] = extremes(seconds)
            row[f"{name}, CPU seconds of all ranks"] = statistics.median(
                sum(each[name]["cpu seconds"]) for each in seen
            )
            if options.limit:
                ideal = options.bytes / options.limit
                row[f"{name}, x N x limit"] = extremes([ideal / value for value in seconds])
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Medians, ranges in brackets."""
    print(f"{options.bytes / (1 << 20):.0f} MiB a rank, {options.rounds} rounds; median (range)")
    for row in rows:
        for name in ("save", "load"):
            middle, low, high = row[name]
            text = f"{row['ranks']} ranks {name} {middle:7.3f} s ({low:.3f} to {high:.3f})"
            if options.limit:
                middle, low, high = row[f"{name}, x N x limit"]
                text += f", {middle:.3f} x N x limit ({low:.3f} to {high:.3f})"
            print(f"{text}, {row[f'{name}, CPU seconds of all ranks']:.2f} s of CPU")
        low, high = row["smallest over mean"], row["largest over mean"]
        print(f"{row['ranks']} ranks wrote {low:.4f} to {high:.4f} of the mean each")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    options = _arguments().parse_args(argv)
    most = max(options.ranks)
    if len(options.dir) < most:
        raise SystemExit(f"{most} ranks need as many --dir; {len(options.dir)} were given")
    options.bytes = options.size // TENSOR_BYTES * TENSOR_BYTES
    if not options.bytes:
        raise SystemExit(f"--size is less than {TENSOR_BYTES} bytes")
    holders = [tempfile.mkdtemp(prefix=".bench-ranks-", dir=d) for d in options.dir[:most]]
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounds, *_ = run_ranks(
                Path(sys.argv[0]),
                most,
                Path(folder),
                directories=holders,
                counts=options.ranks,
                bytes=options.bytes,
                rounds=options.rounds,
            )
    finally:
        for holder in holders:
            shutil.rmtree(holder)
    rows = summary(rounds, options)
    print_table(rows, options)
    if options.json:
        given = {key: value for key, value in vars(options).items() if key != "json"}
        result = {
            "options": given,
            "torch": torch.__version__,
            "processors": os.cpu_count(),
            "rounds": rounds,
            "summary": rows,
        }
        Path(options.json).write_text(json.dumps(result, indent=1))


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", action="append", required=True, help="a directory, once per SSD")
    parser.add_argument("--ranks", type=_counts, default=[1, 2, 4], help="such as 1,2,4 (default)")
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="of each rank (1GiB)")
    parser.add_argument("--limit", type=parse_size, help="bytes a second of one SSD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write every sample there")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2], work)
    main()
