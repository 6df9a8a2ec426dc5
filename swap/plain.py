"""Tensors whose values are not what lies in their memory.

torch hands some of them out by itself: the imaginary part of a conjugated tensor is a *negative
view*, whose elements stand for the negatives of what lies in memory, and the gradient of
``torch.sgn`` is a *ZeroTensor*, which has an address and no memory behind it. Code that reads
memory by its address asks here first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a strided tensor are its values, as far as it has memory."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the values of a strided tensor, as whole numbers of shape [elements, words of
    one]: they tell 0.0 from -0.0, and one NaN from another.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
    word = _WORDS.get(tensor.dtype.itemsize, torch.int64)
    return flat.view(word).view(flat.numel(), tensor.dtype.itemsize // word.itemsize)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors are of one kind and have the same values, bit for bit."""
    is_like = one.shape == other.shape and one.dtype == other.dtype
    return is_like and torch.equal(bits_of(one), bits_of(other))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where its bytes are not its values."""
    return tensor if is_plain(tensor) else tensor.clone()


def is_in_place(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the values of ``tensor``, in order, are the bytes from the first of ``memory`` on.

    An address alone does not say so: a transposed or negative view has it, too.
    """
    has_address = is_plain(tensor) and tensor.data_ptr() == memory.data_ptr()
    return has_address and tensor.is_contiguous()


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory, by strides."""
    is_real = tensor.layout == torch.strided and not tensor.is_meta
    is_real = is_real and not tensor._is_zerotensor() and tensor.numel() > 0
    return is_real and tensor.data_ptr() != 0  # else its values are in other tensors


def reach_bytes(tensor: torch.Tensor) -> int:
    """From the first byte of ``tensor`` to the last."""
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory between the first and the last byte of each has bytes in common."""
    if not (has_bytes(one) and has_bytes(other)) or one.device != other.device:
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + reach_bytes(other) and second < first + reach_bytes(one)


def share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a byte belongs to both, of which the memory between the first and the last byte has
    bytes in common.
    """
    if all(torch.ops.aten.is_non_overlapping_and_dense(tensor) for tensor in (first, second)):
        return True
    if second.data_ptr() < first.data_ptr():
        first, second = second, first
    offset = second.data_ptr() - first.data_ptr()
    nbytes = max(reach_bytes(first), offset + reach_bytes(second))
    of_first = torch.zeros(nbytes, dtype=torch.bool, device="cpu")
    _bytes_in(of_first, first, 0).fill_(True)
    return bool(_bytes_in(of_first, second, offset).any())


def _bytes_in(memory: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """What ``memory``, a byte for each byte, has for those of ``tensor``, which is there."""
    size = tensor.element_size()
    dims = [(n, step * size) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    return memory.as_strided([*(n for n, _ in dims), size], [*(s for _, s in dims), 1], offset)


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that lie in memory are one but for their names."""

    def view(tensor: torch.Tensor) -> tuple[object, ...]:
        where = tensor.data_ptr(), tensor.dtype, tensor.device
        return *where, tensor.shape, tensor.stride(), is_plain(tensor)

    return view(one) == view(other)


def copy_together(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each memory, a flat tensor, the values that its tensor had before the first was written:
    they may lie in the memory of one another.
    """
    away = [(memory, value) for memory, value in moves if not is_in_place(value, memory)]
    values = [
        value.clone() if any(overlap(value, memory) for memory, _ in away) else plain(value)
        for _, value in away
    ]
    for (memory, _), value in zip(away, values, strict=True):
        memory.copy_(value.reshape(-1))


def memory_fault(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no values to read: it is none of memory, or has less than it needs."""
    if tensor.layout != torch.strided:
        return f"is of layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if not tensor.numel() or tensor._is_zerotensor():
        return None
    needed = int(tensor.storage_offset()) * tensor.element_size() + reach_bytes(tensor)
    there = tensor.untyped_storage().nbytes()
    if needed <= there and not tensor.data_ptr():
        return f"is a {type(tensor).__name__} without memory, which has its values in other tensors"
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


def check_array(
    name: str, tensor: torch.Tensor, n: int, *dtypes: torch.dtype, device_type: str = "cpu"
) -> None:
    """Raise unless ``tensor`` is an array of ``n`` elements of one of ``dtypes``, whose address
    code without torch may take.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} is {tensor.dtype}; pass {wanted}")
    if tensor.device.type != device_type or tensor.layout != torch.strided:
        where = "the CPU" if device_type == "cpu" else f"a {device_type} device"
        raise ValueError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}; pass a dense tensor on {where}"
        )
    if tensor.dim() != 1 or tensor.numel() != n:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} where ({n},) is due; pass flat tensors of"
            " equal length"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}; pass a contiguous tensor")
    check_plain(name, tensor)
