"""Tensors whose values are not what lies in their memory.

torch hands some of them out by itself: the imaginary part of a conjugated tensor is a *negative
view*, whose elements stand for the negatives of what lies in memory, and the gradient of
``torch.sgn`` is a *ZeroTensor*, which has an address and no memory behind it. Code that reads
memory by its address asks here first.
"""

from __future__ import annotations

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a strided tensor are its values, as far as it has memory."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where its bytes are not its values."""
    return tensor if is_plain(tensor) else tensor.clone()


def is_in_place(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the values of ``tensor``, in order, are the bytes from the first of ``memory`` on.

    An address alone does not say so: a transposed or negative view has it, too.
    """
    has_address = is_plain(tensor) and tensor.data_ptr() == memory.data_ptr()
    return has_address and tensor.is_contiguous()


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no values to read: it is none of memory, or has less than it needs."""
    if tensor.layout != torch.strided:
        return f"is of layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    last = tensor.numel() - 1
    if last < 0 or tensor._is_zerotensor():
        return None
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if needed <= there:
        return None
    return f"reaches to byte {needed} of a storage of {there} bytes; its memory has been freed"


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for a tensor without memory of its own, which torch reads regardless."""
    fault = memory_fault(tensor)
    if fault is not None:
        raise ValueError(f"{name} {fault}; pass a dense tensor that has its values")


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the bytes of ``tensor`` are there and are its values."""
    check_memory(name, tensor)
    if not is_plain(tensor):
        kind = "ZeroTensor" if tensor._is_zerotensor() else "negated or conjugated view"
        raise ValueError(
            f"{name} is a {kind}, whose values are not what lies in memory; pass its .clone()"
        )
