"""What saving and loading take of processors where the disks take nothing: the path to fast SSDs.

Transfers of an engine here move no bytes and end at once, so that all processor time is that of
planning, staging, checksums, requests and manifests. A row is the best of all rounds: gigabytes
a second that one core carries, or microseconds a tensor. What a core carries, times the cores that
may be spent, is the speed of disks up to which a save is bound by the disks.

    python tools/bench_stages.py --dir DIR [--size 1GiB] [--tensors 20000] [--json out.json]

DIR is on a file system where reserving space is cheap (ext4, xfs); files there have holes.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_small_tensors import make_state, plan
from samples import cpu_name
from ssd_rig import parse_size

import checkpoint
from aio import Engine, Operation, Request
from aio.operation import Outcome, Ticket
from checkpoint.format.manifest import MANIFEST_NAME, decode_manifest

SMALL_BYTES = 64 << 10
_PAGE = 4096
_HEADER_BYTES = 8 << 20
"""No header of the files here is longer."""


class IdleEngine(Engine):
    """What it is asked for has happened at once, and nothing has, but at the beginning of a file:
    readers look at its header.
    """

    def submit(self, requests: Sequence[Request], lane: int | None = None) -> list[Operation]:
        return [
            self._ended(request)
            if request.offset >= _HEADER_BYTES
            else super(IdleEngine, self).submit([request])[0]
            for request in requests
        ]

    def _ended(self, request: Request) -> Operation:
        given: Any = request.buffer
        ticket = Ticket(self._core, request, memoryview(given).nbytes)
        ticket.complete(Outcome(ticket.nbytes, 0, 0.0, 0.0))
        return Operation(request, ticket)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    options = _arguments().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix=".bench-stages-", dir=options.dir) as folder:
        result = run(options, Path(folder))
    print(f"{result['cpu']}; best of {options.rounds}, processor time of all threads")
    for name, (number, unit) in result["rows"].items():
        print(f"{name:44} {number:8.2f} {unit}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, by name: (number, unit)."""
    nbytes = parse_size(options.size)
    rows: dict[str, tuple[float, str]] = {}
    with IdleEngine() as idle:
        for name, offset in (("from where it lies", 0), ("copied, as it is off the pages", 1)):
            state = {"w": one_tensor(nbytes, offset)}
            path = folder / f"large-{offset}"
            seconds = best(partial(checkpoint.save, state, path, engine=idle), options)
            rows[f"save, one tensor {name}"] = nbytes / seconds / 1e9, "GB/s a core"
        path = folder / "large-0"
        into = {"w": one_tensor(nbytes, 0)}
        seconds = best(lambda: checkpoint.load(path, into=into, engine=idle), options)
        rows["load into a live tensor, verified"] = nbytes / seconds / 1e9, "GB/s a core"
        seconds = best(lambda: checkpoint.load(path, engine=idle), options)
        rows["load into a new tensor, verified"] = nbytes / seconds / 1e9, "GB/s a core"
        rows["  of which the kernel, for new pages"] = nbytes / touched(nbytes) / 1e9, "GB/s a core"
        rows |= small_rows(options, folder / "small", idle)
    rows |= request_rows(options, folder)
    return {"cpu": cpu_name(), "bytes": nbytes, "rows": rows}


def small_rows(
    options: argparse.Namespace, path: Path, idle: Engine
) -> dict[str, tuple[float, str]]:
    """Of many tensors of 64 KiB: whole calls, and their planning and decoding alone."""
    count = options.tensors
    state = {"model": {k: v.zero_() for k, v in make_state(count, SMALL_BYTES)["model"].items()}}
    work: dict[str, Callable[[], object]] = {
        "save, tensors of 64 KiB": lambda: checkpoint.save(state, path, engine=idle),
        "  of which planned": lambda: plan(state),
        "load into live tensors of 64 KiB": lambda: checkpoint.load(path, into=state, engine=idle),
        "  of which its manifest decoded": lambda: decode_manifest(
            (path / MANIFEST_NAME).read_bytes()
        ),
    }
    seconds = {name: best(one, options) for name, one in work.items()}
    return {name: (spent / count * 1e6, "us a tensor") for name, spent in seconds.items()}


def request_rows(options: argparse.Namespace, folder: Path) -> dict[str, tuple[float, str]]:
    """A request from Python through a lane and back: what one of so many bytes leaves of a core."""
    rows = {}
    for nbytes in (2 << 20, 16 << 20):
        with Engine("memory") as engine, engine.open(folder / f"requests-{nbytes}", "w") as file:
            seconds = best(partial(requests, engine, file, options.requests), options)
        each = seconds / options.requests
        rows[f"requests, if of {nbytes >> 20} MiB"] = nbytes / each / 1e9, "GB/s a core"
    return rows


def requests(engine: Engine, file: Any, count: int) -> None:
    """A page each: what is moved is next to nothing, what is done for it is as for any."""
    page = bytearray(_PAGE)
    under_way: list[Operation] = []
    for number in range(count):
        under_way += engine.submit([Request("write", file, number % 64 * _PAGE, page)], lane=0)
        if len(under_way) == 8:
            under_way.pop(0).result()
    for operation in under_way:
        operation.result()


def one_tensor(nbytes: int, offset: int) -> torch.Tensor:
    """Zeros at a page, or ``offset`` elements behind one, all of whose pages are there."""
    whole = torch.zeros(nbytes // 4 + 2 * _PAGE)
    first = -whole.data_ptr() % _PAGE // 4 + offset
    return whole[first : first + nbytes // 4].fill_(0.0)


def touched(nbytes: int) -> float:
    """Processor seconds for the pages of so much new memory, as ``torch.zeros`` takes them."""
    began = time.process_time()
    torch.zeros(nbytes // 4).fill_(0.0)
    return time.process_time() - began


def best(work: Callable[[], object], options: argparse.Namespace) -> float:
    """The least processor time of a call."""
    spent = []
    for _ in range(options.rounds):
        gc.collect()
        began = time.process_time()
        made = work()
        spent.append(time.process_time() - began)
        del made  # what it takes to let go of it is not counted
    return min(spent)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", required=True, help="a directory, on ext4 or xfs")
    parser.add_argument("--size", default="1GiB", help="of the large tensor")
    parser.add_argument("--tensors", type=int, default=20_000, help="small ones")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write all numbers here")
    return parser


if __name__ == "__main__":
    main()
