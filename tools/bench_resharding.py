"""What is read of a checkpoint for what is asked for, where ranks take other parts than were saved.

A checkpoint holds each tensor in the boxes that some ranks have of it. Then others ask for theirs,
through each of the ways in: `checkpoint.load` into sinks that have ranges, indices of
`checkpoint.open`, DCP's reader, and `offloaded.load` on three ranks of what four saved. A row has
the bytes that requests of the engine read, headers and manifests aside, over those that were asked
for, of all ranks together and of the one that reads the most for what it asks; and the seconds that
all ranks took, one after the other. Every byte that is read is verified.

    python tools/bench_resharding.py --dir DIR [--scale 4] [--json out.json]

Bytes are the same in every run; seconds are medians of `--rounds`. Nothing stays in the directory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from local_ranks import Job, be_rank, run_ranks
from resharding_ways import (
    Box,
    Boxes,
    Tensors,
    indices,
    named,
    planned,
    save_in_boxes,
    sinks,
)
from samples import extremes, seconds_of

from aio import Engine, Operation, Request

Shapes = Mapping[str, tuple[int, ...]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    options = _arguments().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix=".bench-resharding-", dir=options.dir) as folder:
        rows = [measured(case, Path(folder), options.rounds) for case in cases(options.scale)]
        rows.append(offloaded(Path(folder), options.rounds))
    for name, row in rows:
        low, middle, high = row["seconds"][1], row["seconds"][0], row["seconds"][2]
        print(
            f"{name:58} {row['asked'] / 1e6:8.2f} MB {row['ratio']:7.3f} {row['worst']:7.3f} "
            f"{middle:7.3f} ({low:.3f} to {high:.3f}) s"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(dict(rows), indent=1))


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors that are saved in boxes, and the boxes of them that ranks then ask for, `through` a
    way in.
    """

    name: str
    tensors: Mapping[str, tuple[int, ...]]
    saved: Boxes
    asked: Boxes
    through: Callable[[Path, Tensors, list[Box]], None]


def cases(scale: int) -> list[Case]:
    """All but that of an offloaded model. `scale` times 16 MiB is a large tensor, in float32."""
    rows = 1024 * scale
    uneven: Shapes = {f"layer{k}": (rows * (k + 2) // 4 + 17, 4096) for k in range(4)}
    large: Shapes = {"w": (rows, 4096)}
    wide: Shapes = {"w": (rows // 8, 32768)}
    small: Shapes = {f"layer{k}": (16, 1024) for k in range(1000)}
    tiny: Shapes = {f"norm{k}": (1024,) for k in range(1000)}
    return [
        Case("rows, 4 to 3 ranks, load", uneven, cut(0, 4), cut(0, 3), sinks),
        Case("rows, 4 to 3 ranks, open", uneven, cut(0, 4), cut(0, 3), indices),
        Case("rows, 4 to 3 ranks, DCP", uneven, cut(0, 4), cut(0, 3), planned),
        Case("shards of 256 KiB of a tensor, load", large, cut(0, 1), every(16, 37), sinks),
        Case("shards of 256 KiB of a tensor, open", large, cut(0, 1), every(16, 37), indices),
        Case("shards of 256 KiB of a tensor, DCP", large, cut(0, 1), every(16, 37), planned),
        Case("shards of 0.25 MB off the pages, load", odd(large), cut(0, 1), every(16, 37), sinks),
        Case("columns of rows of 128 KiB, 1 to 3, open", wide, cut(0, 1), cut(1, 3), indices),
        Case("columns of rows of 128 KiB, 1 to 3, DCP", wide, cut(0, 1), cut(1, 3), planned),
        Case("columns of rows of 16 KiB, 1 to 4, open", large, cut(0, 1), cut(1, 4), indices),
        Case("columns of rows of 16 KiB, 1 to 4, DCP", large, cut(0, 1), cut(1, 4), planned),
        Case("columns of rows of 16 KiB, 1 to 3, DCP", large, cut(0, 1), cut(1, 3), planned),
        Case("columns, 4 to 4 ranks, DCP", large, cut(1, 4), cut(1, 4), planned),
        Case("columns of rows of 128 KiB, 4 to 3, open", wide, cut(1, 4), cut(1, 3), indices),
        Case("columns of rows of 128 KiB, 4 to 3, DCP", wide, cut(1, 4), cut(1, 3), planned),
        Case("columns saved, rows asked for, 4 to 3, open", wide, cut(1, 4), cut(0, 3), indices),
        Case("columns saved, rows asked for, 4 to 3, DCP", wide, cut(1, 4), cut(0, 3), planned),
        Case("1000 tensors of 64 KiB, rows, 4 to 3, load", small, cut(0, 4), cut(0, 3), sinks),
        Case("1000 tensors of 64 KiB, rows, 4 to 3, DCP", small, cut(0, 4), cut(0, 3), planned),
        Case("1000 tensors of 64 KiB, whole, 4 to 1, load", small, cut(0, 4), cut(0, 1), sinks),
        Case("every other tensor of 64 KiB, load(only=)", small, cut(0, 1), cut(0, 1), named),
        Case("1000 tensors of 4 KiB, 4 to 3, load", tiny, cut(0, 4), cut(0, 3), sinks),
    ]


def cut(axis: int, count: int) -> Boxes:
    """As many ranks, each with a slice along a dimension, as even as can be."""

    def boxes(shape: tuple[int, ...]) -> list[Box]:
        ends = [shape[axis] * rank // count for rank in range(count + 1)]
        return [
            (
                tuple(ends[rank] if one == axis else 0 for one in range(len(shape))),
                (*shape[:axis], ends[rank + 1] - ends[rank], *shape[axis + 1 :]),
            )
            for rank in range(count)
        ]

    return boxes


def every(rows: int, step: int) -> Boxes:
    """Of the ranks that have so many rows each, every so manieth."""

    def boxes(shape: tuple[int, ...]) -> list[Box]:
        firsts = range(0, shape[0] - rows + 1, rows)[::step]
        return [((low, *(0 for _ in shape[1:])), (rows, *shape[1:])) for low in firsts]

    return boxes


def odd(tensors: Shapes) -> Shapes:
    """The same with rows that are no pages."""
    return {name: (*shape[:-1], shape[-1] - 5) for name, shape in tensors.items()}


def measured(case: Case, folder: Path, rounds: int) -> tuple[str, dict[str, Any]]:
    """A row of the table."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.rand(*shape, generator=generator) for name, shape in case.tensors.items()
    }
    path = folder / case.name.replace(" ", "-").replace(",", "")
    save_in_boxes(path, tensors, case.saved)
    every_rank = zip(*(case.asked(shape) for shape in case.tensors.values()), strict=True)
    asked, read, times = [], [], [0.0] * rounds
    for boxes in every_rank:
        count = sum(math.prod(shape) for _, shape in boxes) * 4
        if case.through is named:
            count //= 2
        asked.append(count)
        for number in range(rounds):
            with counted() as reads:
                times[number] += seconds_of(partial(case.through, path, tensors, list(boxes)))
        read.append(sum(reads))
    return case.name, _row(asked, read, times)


def _row(asked: Sequence[int], read: Sequence[int], times: Sequence[float]) -> dict[str, Any]:
    return {
        "asked": sum(asked),
        "ratio": sum(read) / sum(asked),
        "worst": max(one / other for one, other in zip(read, asked, strict=True)),
        "seconds": extremes(times),
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each read of data that engines are asked for meanwhile, without headers of files."""
    sizes: list[int] = []
    submit, headers = Engine.submit, _Headers()

    def counting(
        engine: Engine, requests: Sequence[Request], *, lane: int | None = None
    ) -> list[Operation]:
        sizes.extend(
            np.asarray(request.buffer).nbytes
            for request in requests
            if request.kind == "read" and request.offset >= headers[request.file.path]
        )
        return submit(engine, requests, lane=lane)

    with mock.patch.object(Engine, "submit", counting):
        yield sizes


class _Headers(dict[Path, int]):
    """Bytes of the headers of data files; 0 of any other file."""

    def __missing__(self, path: Path) -> int:
        if path.suffix != ".safetensors":
            return self.setdefault(path, 0)
        with path.open("rb") as file:
            return self.setdefault(path, 8 + int.from_bytes(file.read(8), "little"))


def offloaded(folder: Path, rounds: int) -> tuple[str, dict[str, Any]]:
    """The row of an offloaded model that four ranks save and three load."""
    path, nvme = folder / "model", folder / "nvme"
    nvme.mkdir()
    program = Path(__file__).resolve()
    given = {"path": str(path), "nvme": str(nvme)}
    run_ranks(program, 4, folder / "four", rounds=0, **given)
    every_rank = run_ranks(program, 3, folder / "three", rounds=rounds, **given)
    times = [max(rank["times"][number] for rank in every_rank) for number in range(rounds)]
    asked, read = ([rank[what] for rank in every_rank] for what in ("asked", "read"))
    return "a model, 4 to 3 ranks, offloaded.load", _row(asked, read, times)


def be_model(job: Job) -> dict[str, Any]:
    """A rank of a model: it saves, or loads as often as it is told and says what that took."""
    import torch.distributed as dist
    from gpt import GPT

    import infinity

    torch.manual_seed(0)
    model = GPT(width=512, depth=4, vocabulary=8192, tokens=64)
    given, times = job.arguments, []
    with infinity.offload(
        model, given["nvme"], host_memory="1GiB", process_group=dist.group.WORLD
    ) as handle:
        if not given["rounds"]:
            batch = torch.zeros(1, 64, dtype=torch.int64)
            model(batch, batch).backward()
            handle.step()
            handle.save(given["path"])
            return {}
        for _ in range(given["rounds"]):
            with counted() as reads:
                times.append(seconds_of(lambda: handle.load(given["path"])))
    asked = 12 * sum(one.numel() for one in model.parameters()) // job.world_size
    return {"asked": asked, "read": sum(reads), "times": times}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", required=True, help="a directory on the disk to read from")
    parser.add_argument("--scale", type=int, default=4, help="a large tensor has 16 MiB times this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write all numbers here")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2], be_model)
    main()
