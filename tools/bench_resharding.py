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
from pathlib import Path
from typing import Any

import torch
from local_ranks import Job, be_rank, run_ranks
from samples import extremes, seconds_of
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import checkpoint
from aio import Engine
from checkpoint.format.slices import shared_box

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, shape)."""
Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Boxes = Callable[[tuple[int, ...]], list[Box]]
"""What each rank has of a tensor of a shape."""


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
                times[number] += seconds_of(lambda: case.through(path, tensors, list(boxes)))  # noqa: B023
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

    def counting(engine: Engine, requests: Any, *, lane: int | None = None) -> Any:
        sizes.extend(
            memoryview(request.buffer).nbytes
            for request in requests
            if request.kind == "read" and request.offset >= headers[request.file.path]
        )
        return submit(engine, requests, lane=lane)

    Engine.submit = counting  # type: ignore[method-assign, assignment]
    try:
        yield sizes
    finally:
        Engine.submit = submit  # type: ignore[method-assign]


class _Headers(dict[Path, int]):
    """Bytes of the headers of data files; 0 of any other file."""

    def __missing__(self, path: Path) -> int:
        if path.suffix != ".safetensors":
            return self.setdefault(path, 0)
        with path.open("rb") as file:
            return self.setdefault(path, 8 + int.from_bytes(file.read(8), "little"))


class _Planner:
    """DCP's planner of tensors that are there: gives the parts that items are of."""

    def __init__(self, parts: Mapping[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        self._parts = parts

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        return self._parts[item.index.fqn, tuple(item.index.offset or ())]

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._parts[item.dest_index.fqn, tuple(item.dest_offsets)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is to be done."""


def save_in_boxes(path: Path, tensors: Tensors, saved: Boxes) -> None:
    """Saves what each rank has, as DCP on so many ranks does."""
    boxes = {name: saved(tuple(tensor.shape)) for name, tensor in tensors.items()}
    count = max(map(len, boxes.values()))
    writer = checkpoint.dcp.StorageWriter(path)
    parts = {
        (name, start): part_of(tensors[name], (start, shape)).contiguous()
        for name, own in boxes.items()
        for start, shape in own
    }
    plans = [
        SavePlan([_write_item(name, tensors[name], own[rank]) for name, own in boxes.items()])
        for rank in range(count)
    ]
    writer.set_up_storage_writer(True)
    orders = writer.prepare_global_plan(plans)
    results = [writer.write_data(order, _Planner(parts)).wait() for order in orders]
    paths = {name: (name,) for name in tensors}
    known: dict[str, Any] = dict.fromkeys(tensors)
    writer.finish(Metadata(known, planner_data=paths), results)


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What lies in a box."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def _write_item(name: str, tensor: torch.Tensor, box: Box) -> WriteItem:
    start, shape = box
    chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
    properties = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk, properties, tensor.size())
    return WriteItem(MetadataIndex(name, torch.Size(start)), WriteItemType.SHARD, tensor_data=data)


class _Sink:
    """Takes the rows that a rank asks for."""

    dtype = torch.float32

    def __init__(self, tensor: torch.Tensor, box: Box) -> None:
        inner = math.prod(tensor.shape[1:])
        self.shape = tuple(tensor.shape)
        self.ranges = ((box[0][0] * inner, math.prod(box[1])),)
        self.values = torch.zeros(math.prod(box[1]))
        self._first_byte = self.ranges[0][0] * 4
        self._bytes = self.values.view(torch.uint8)

    def write(self, start: int, data: memoryview) -> None:
        low = max(start, self._first_byte)
        high = min(start + len(data), self._first_byte + self._bytes.numel())
        if low < high:
            given = torch.frombuffer(data[low - start : high - start], dtype=torch.uint8)
            self._bytes[low - self._first_byte : high - self._first_byte].copy_(given)


def sinks(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.load(path, into=)` of sinks that have ranges."""
    into = {name: _Sink(tensors[name], box) for name, box in zip(tensors, boxes, strict=True)}
    checkpoint.load(path, into=into)
    for (name, sink), box in zip(into.items(), boxes, strict=True):
        check(sink.values, part_of(tensors[name], box).reshape(-1))


def named(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.load(path, only=)`, of every other tensor."""
    for name, value in checkpoint.load(path, only=list(tensors)[::2]).items():
        check(value, tensors[name])


def indices(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through `checkpoint.open(path)[name][rows, columns]`."""
    with checkpoint.open(path) as lazy:
        for (name, tensor), (start, shape) in zip(tensors.items(), boxes, strict=True):
            index = tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
            check(lazy[name][index], tensor[index])


def planned(path: Path, tensors: Tensors, boxes: list[Box]) -> None:
    """Through DCP's reader."""
    reader = checkpoint.dcp.StorageReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    items, parts, wholes = [], {}, []
    for (name, tensor), (start, shape) in zip(tensors.items(), boxes, strict=True):
        values = torch.zeros(shape)
        wholes.append((values, part_of(tensor, (start, shape))))
        for chunk in metadata.state_dict_metadata[name].chunks:
            shared = shared_box(tuple(chunk.offsets), tuple(chunk.sizes), start, shape)
            if shared is not None:
                low, size = shared
                inside = tuple(a - b for a, b in zip(low, start, strict=True))
                parts[name, inside] = part_of(values, (inside, size))
                items.append(_read_item(name, tuple(chunk.offsets), shared, inside))
    plan = reader.prepare_local_plan(LoadPlan(items))
    reader.read_data(plan, _Planner(parts)).wait()
    for found, expected in wholes:
        check(found, expected)


def _read_item(name: str, chunk: tuple[int, ...], box: Box, inside: tuple[int, ...]) -> ReadItem:
    low, size = box
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(name, torch.Size(inside)),
        torch.Size(inside),
        MetadataIndex(name, torch.Size(chunk)),
        torch.Size(a - b for a, b in zip(low, chunk, strict=True)),
        torch.Size(size),
    )


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """SystemExit if a value was not read as it was saved."""
    if not torch.equal(found, expected):
        raise SystemExit("what was loaded is not what was saved")


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
