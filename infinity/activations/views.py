"""What a strided tensor is of the memory that it lies in, so that it can be made again over other
memory with the same bytes. Pure.

Dtype, conjugation and negation belong to it as size, strides and offset do: the complex view of a
parameter has its storage and not its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swap.plain import is_plain


@dataclass(frozen=True, slots=True)
class View:
    """A view of memory that begins ``offset_bytes`` before its first element."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor, start_bytes: int) -> View:
        """What ``tensor`` is of the memory from byte ``start_bytes`` of its storage."""
        return View(
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset_bytes=int(tensor.storage_offset()) * tensor.dtype.itemsize - start_bytes,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The same view of the memory that flat ``memory`` begins with; it has no history.

        Memory that begins where this dtype cannot lie is copied first.
        """
        start = int(memory.storage_offset()) * memory.dtype.itemsize + self.offset_bytes
        if start % self.dtype.itemsize:
            return self.over(memory.detach().clone())
        empty: Any = torch.empty(0, dtype=self.dtype, device=memory.device)
        offset = start // self.dtype.itemsize
        tensor: torch.Tensor = empty.set_(memory.untyped_storage(), offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.is_neg else tensor


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of bytes of its storage that a strided tensor, not empty, reaches over."""
    first = int(tensor.storage_offset())
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.dtype.itemsize, (last + 1) * tensor.dtype.itemsize


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor is all of its storage, in any order of dimensions."""
    return (
        tensor.layout == torch.strided
        and tensor.is_floating_point()
        and 0 < tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
        and is_plain(tensor)
        and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )
