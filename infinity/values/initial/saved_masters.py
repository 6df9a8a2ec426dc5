"""Float32 masters in a checkpoint that ``offloaded.save`` wrote, beside the weights in the compute
dtype: ``optimizer.lo.*`` completes bfloat16, ``optimizer.master.*`` stands for float16.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import ClassVar

import torch

from checkpoint.format.records import Manifest
from checkpoint.format.tree import MISSING, decode_tree
from checkpoint.tensors.sources import ByteSource
from swap.kernels import merge_master

_WEIGHTS = "model."
_FORMAT = "infinity.format"


def says_training(manifest: Manifest) -> bool:
    """Whether ``offloaded.save`` wrote it: what others call a master may be anything."""
    found = decode_tree(manifest.tree, lambda *_: MISSING, lambda name: name == _FORMAT)
    return found is not MISSING


def master_beside(
    weight: ByteSource, name: str, names: Container[str], source: Callable[[str], ByteSource]
) -> ByteSource | None:
    """The master of the weight that is stored as ``name``, if it has one there. ``source`` gives
    what is stored under one of ``names``.
    """
    if not name.startswith(_WEIGHTS):
        return None
    rest = name.removeprefix(_WEIGHTS)
    for component, dtype in (("lo", torch.int16), ("master", torch.float32)):
        stored = f"optimizer.{component}.{rest}"
        if stored not in names:
            continue
        found = source(stored)
        if found.dtype == dtype and tuple(found.shape) == tuple(weight.shape):
            return found if component == "master" else MergedHalves(weight, found, weight.shape)
    return None


@dataclass(slots=True)
class MergedHalves:
    """A ``ByteSource`` of masters, whose halves are ``high`` (bfloat16) and ``low`` (int16)."""

    high: ByteSource
    low: ByteSource
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    thread_safe: ClassVar[bool] = True

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``; whole elements."""
        masters = torch.frombuffer(out, dtype=self.dtype)
        first = start // masters.itemsize
        high = _read(self.high, first, masters.numel())
        merge_master(high, _read(self.low, first, masters.numel()), masters)


def _read(source: ByteSource, first: int, numel: int) -> torch.Tensor:
    values = torch.empty(numel, dtype=source.dtype, device="cpu")
    source.read(first * values.itemsize, values.view(torch.uint8).numpy().data)
    return values
