"""A checkpoint of one tensor in boxes, as ranks save what is sharded by other dimensions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.directory.locate import read_manifest
from checkpoint.format.manifest import MANIFEST_NAME, encode_manifest
from checkpoint.format.records import ChunkRecord
from checkpoint.loading import chunks, opened
from checkpoint.transfer import kept_blocks

Box = tuple[slice, ...]
BLOCK = 64 << 10
UNIT = 1 << 10


@dataclass
class Reads:
    """Where and how much was read of the data files while this was `counting`."""

    places: list[tuple[int, int, int]] = field(default_factory=list)
    """File, first byte in the chunk, bytes."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.places)

    @property
    def files(self) -> set[int]:
        return {file for file, _, _ in self.places}


@contextmanager
def small_blocks(kept_bytes: int = 64 << 20) -> Iterator[Reads]:
    """Checksum blocks of 64 KiB, of which so many bytes are kept, and their reads."""
    reads, begin = Reads(), chunks.ChunkReader._begin

    def counting(self: Any, record: Any, chunk: Any, number: int, into: Any, *rest: Any) -> Any:
        reads.places.append((chunk.file, number * BLOCK + sum(rest), len(into)))
        return begin(self, record, chunk, number, into, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("checkpoint.") and hasattr(module, "CRC_BLOCK_BYTES"):
                patch.setattr(module, "CRC_BLOCK_BYTES", BLOCK)
        patch.setattr(kept_blocks, "UNIT_BYTES", UNIT)
        patch.setattr(opened, "KEPT_BYTES", kept_bytes)
        patch.setattr(chunks.ChunkReader, "_begin", counting)
        yield reads


def columns(tensor: torch.Tensor, axis: int, ends: Sequence[int]) -> list[Box]:
    """Boxes that end there along a dimension."""
    lows = [0, *ends[:-1]]
    return [(slice(None),) * axis + (slice(a, b),) for a, b in zip(lows, ends, strict=True)]


def save_in_boxes(path: Path, name: str, tensor: torch.Tensor, boxes: Sequence[Box]) -> None:
    """Saves boxes that make up a tensor, a data file each, under `small_blocks`."""
    stripes = [path.parent / f"{path.name}-{number}" for number in range(len(boxes))]
    places = []
    for box, stripe in zip(boxes, stripes, strict=True):
        stripe.mkdir()
        indices = [part.indices(size) for part, size in zip(box, tensor.shape, strict=False)]
        rest = tensor.shape[len(box) :]
        start = tuple(low for low, _, _ in indices) + (0,) * len(rest)
        places.append((start, tuple(high - low for low, high, _ in indices) + tuple(rest)))
    parts = [tensor[box].contiguous() for box in boxes]
    checkpoint.save({str(number): part for number, part in enumerate(parts)}, path, stripes)
    manifest = read_manifest(path)
    found = {record.name: record for record in manifest.tensors}
    records_of = [found[str(number)].chunks for number in range(len(boxes))]
    made: list[ChunkRecord] = []
    for (start, shape), (chunk,) in zip(places, records_of, strict=True):
        made.append(chunk._replace(start=start, shape=shape))
    record = found["0"]._replace(name=name, shape=tuple(tensor.shape), chunks=tuple(made))
    tree = {"dict": {name: {"tensor": 0}}}
    raw = encode_manifest(replace(manifest, tensors=(record,), tree=tree))
    (path / MANIFEST_NAME).write_bytes(raw)
