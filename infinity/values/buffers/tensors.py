"""What can be told of a buffer, of whatever kind, and what is changed in one."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoint.format.checksum import crc32c
from checkpoint.format.slices import may_overlap_itself, span_elements
from swap.plain import bits_of


def kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """The same for tensors whose elements can be compared one by one."""
    shape = None if tensor.is_nested else tensor.shape
    return shape, tensor.layout, tensor.dtype, tensor.device


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether each of its elements is so many bytes at an address."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are of one kind and have the same bits, as far as that can be told."""
    can_tell = kind_of(one) == kind_of(other) and has_bits(one)
    return can_tell and torch.equal(bits_of(one), bits_of(other))


def can_be_view(buffer: torch.Tensor) -> bool:
    """Whether a view of another tensor can stand for it, which has its values alone."""
    if type(buffer) is not torch.Tensor or not has_bits(buffer) or buffer.is_meta:
        return False
    return bool(buffer.numel()) and not (
        buffer.requires_grad or buffer.is_conj() or buffer.is_neg() or buffer.is_inference()
    )


def elements_of(tensor: torch.Tensor) -> object:
    """The same for tensors that are the same elements of one memory, whatever their names."""
    steps = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), *steps, kind_of(tensor)


def checksum(tensor: torch.Tensor) -> object:
    """The same as long as its bits are; None where it has none."""
    if tensor.is_meta or not has_bits(tensor):
        return None
    bits = bits_of(tensor).view(-1).to("cpu", copy=True)  # what numpy has seen cannot be resized
    return crc32c(bits.view(torch.uint8).numpy().data)


def is_none(changed: torch.Tensor | None) -> bool:
    """Whether it can be told what was ``changed``, and nothing was."""
    return changed is not None and not bool(changed.any())


def merged(came: torch.Tensor, buffer: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """The elements of ``buffer`` that were ``changed``, and of the others what they came with."""
    with torch.no_grad():
        return torch.where(changed.to(came.device), buffer.to(came.device, came.dtype), came)


def write(before: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``before`` has these values now. Memory that cannot be written to keeps its own."""
    if before.is_inference() or may_overlap_itself(before.shape, before.stride()):
        return False
    if _is_read_only(before):
        return False
    with torch.no_grad():
        before.copy_(values)
    return True


def _is_read_only(tensor: torch.Tensor) -> bool:
    """Whether a write would end the process, as into a file that is mapped to be read: torch takes
    such memory for its own.
    """
    if not _may_be_mapped(tensor):
        return False
    start = tensor.data_ptr()
    end = start + span_elements(tensor.shape, tensor.stride()) * tensor.itemsize
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        ends, access = line.split(maxsplit=2)[:2]
        first, behind = (int(one, 16) for one in ends.split("-"))
        if first < end and start < behind and "w" not in access:
            return True
    return False


def _may_be_mapped(tensor: torch.Tensor) -> bool:
    """What torch has allocated itself, it can resize."""
    is_here = tensor.device.type == "cpu" and has_bits(tensor) and bool(tensor.numel())
    return is_here and not tensor.untyped_storage().resizable()
