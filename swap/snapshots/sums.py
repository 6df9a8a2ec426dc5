"""Checksums of what a snapshot keeps on NVMe, as they are saved beside it: pure, no I/O.

They are those that ``swap.storage.checksums`` has of the same blocks, so that a process that takes
up the files of another knows what was written to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from swap.plan.layout import PAGE
from swap.snapshots.contents import Contents, FileRange

Sums = Mapping[FileRange, np.ndarray]


def encode_sums(sums: Iterable[np.ndarray]) -> torch.Tensor:
    """Those of the ranges of ``Contents``, in their order, as a tensor that ``decode_sums`` takes:
    int32, with the bits of what is unsigned.
    """
    return torch.from_numpy(np.concatenate([np.zeros(0, np.uint32), *sums]).view(np.int32))


def decode_sums(contents: Contents, table: torch.Tensor) -> Sums:
    """By range. Raises ``ValueError`` for a table of another length."""
    known = table.numpy().view(np.uint32)
    parts = [part for parts in contents.ranges.values() for part in parts]
    blocks = [-(-part.nbytes // PAGE) for part in parts]
    if sum(blocks) != known.size:
        raise ValueError(f"there are {known.size} checksums of {sum(blocks)} blocks")
    return dict(zip(parts, np.split(known, np.cumsum(blocks)[:-1]), strict=True)) if parts else {}
