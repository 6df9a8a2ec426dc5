"""The memory behind a parameter or a gradient, as flat elements: of a DTensor, this rank's shard.

A dense tensor of any strides is seen in the order in which its elements lie in memory (its
*layout*: the dimensions, outermost first), so nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch

Layout = tuple[int, ...]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Asked so, a program without any need not import them."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the shard of a DTensor that this rank holds; detached."""
    if not is_distributed(tensor):
        return tensor.detach()
    whole: Any = tensor
    shard = whole.to_local().detach()
    # A shard may still be on its way; waiting for it gives a plain tensor.
    return shard.wait() if hasattr(shard, "wait") else shard  # type: ignore[no-any-return]


def layout_of(tensor: torch.Tensor) -> Layout:
    """The dimensions of a local tensor, outermost first.

    Raises ``ValueError`` when its elements do not lie side by side in memory, each once.
    """
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    if not tensor.permute(order).is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "dense in memory; make it so with .contiguous()"
        )
    return order


def flat(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The elements of a local tensor in the order of ``layout``: a view, or a copy where it lies
    otherwise.
    """
    return tensor.permute(layout).reshape(-1)


def copy_elements(tensor: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Copy ``len(out)`` elements of ``tensor``, from element ``start`` in the order of its
    dimensions, to the flat ``out``. It may be of any strides, and nothing else is copied.
    """
    if tensor.dim() <= 1:
        out.copy_(tensor.reshape(-1)[start : start + len(out)])
        return
    row = tensor[0].numel()
    first, last = start // row, (start + len(out)) // row
    head = min(len(out), -start % row)
    tail = 0 if head == len(out) else (start + len(out)) % row
    if head:
        copy_elements(tensor[first], start % row, out[:head])
        first += 1
    if first < last:
        whole = tensor[first:last]
        out[head : len(out) - tail].view(whole.shape).copy_(whole)
    if tail:
        copy_elements(tensor[last], 0, out[len(out) - tail :])


def shape_in(layout: Layout, shape: torch.Size) -> tuple[int, ...]:
    """``shape`` in the order of ``layout``."""
    return tuple(shape[dimension] for dimension in layout)


def unflat(values: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """Undo ``flat``: a view of ``shape``."""
    inverse = sorted(range(len(layout)), key=layout.__getitem__)
    return values.view(shape_in(layout, shape)).permute(inverse)


def like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local tensor as a DTensor sharded as ``parameter`` is; itself if that is none."""
    if not is_distributed(parameter):
        return values
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    return DTensor.from_local(
        values,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
