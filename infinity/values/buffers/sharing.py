"""Buffers that lie in one another's memory: which do, and what is converted together for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from checkpoint.format.slices import may_overlap_itself, span_elements
from infinity.values.buffers.tensors import can_be_view, write


def sharing_as_before(
    buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor], is_saved: Sequence[bool]
) -> list[torch.Tensor]:
    """The ``values``, which a file may have given, each by itself: where ``buffers`` lie in one
    another's memory, views of one tensor with what loading a state dict into these would leave.
    """
    found = list(values)
    places: dict[int, list[int]] = {}
    for place, buffer in enumerate(buffers):
        places.setdefault(id(buffer), []).append(place)
    for group in _groups(buffers):
        taken = sorted(place for buffer in group for place in places[id(buffer)])
        given = [place for place in taken if values[place] is not buffers[place]]
        if len(taken) == 1 or not given:
            continue
        if not can_be_view(group[0]):  # one tensor in several places, such as one on meta
            # Of those on meta one that is not saved has what its module computes, and no file.
            last = max(given, key=lambda place: (is_saved[place], place))
            for place in taken:
                found[place] = values[last]
            continue
        pairs = [(values[place], buffers[place]) for place in given]
        if any(new.shape != old.shape or new.dtype != old.dtype for new, old in pairs):
            continue
        together = _convert_group(group, torch.clone)  # they stay as they are until the end
        for place in given:
            write(together[id(buffers[place])], values[place])
        for place in taken:
            view = together[id(buffers[place])]
            # What cannot be written, as what `expand` gives, may be given values that no other has.
            is_written = place not in given or not may_overlap_itself(view.shape, view.stride())
            if is_written or torch.equal(view, values[place]):
                found[place] = view
    return found


def convert_together(
    buffers: Iterable[torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """What ``convert`` gives, by ``id``; of those that share memory, views of one tensor."""
    parts = (_convert_group(group, convert) for group in _groups(buffers))
    return {key: tensor for part in parts for key, tensor in part.items()}


def _groups(buffers: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Each of them once, those together that lie in one another's memory."""
    groups: list[list[torch.Tensor]] = []
    by_memory: dict[object, list[torch.Tensor]] = {}
    for buffer in {id(buffer): buffer for buffer in buffers}.values():
        if can_be_view(buffer):
            memory = buffer.untyped_storage()._cdata, buffer.dtype
            by_memory.setdefault(memory, []).append(buffer)
        else:
            groups.append([buffer])
    for sharing in by_memory.values():
        groups += _overlapping(sharing)
    return groups


def _overlapping(buffers: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those of one storage, put together where the ranges that they lie in overlap."""
    groups: list[list[torch.Tensor]] = []
    reach = 0
    for buffer in sorted(buffers, key=torch.Tensor.storage_offset):
        if not groups or buffer.storage_offset() >= reach:
            groups.append([])
        groups[-1].append(buffer)
        reach = max(reach, _end(buffer))
    return groups


def _end(buffer: torch.Tensor) -> int:
    """The place in its storage, in elements, after that of its last element."""
    return int(buffer.storage_offset() + span_elements(buffer.shape, buffer.stride()))


def _convert_group(
    group: list[torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    first = group[0]
    if len(group) == 1:
        return {id(first): convert(first)}
    start = first.storage_offset()
    span = first.as_strided([max(map(_end, group)) - start], [1], start)
    memory = convert(span)
    if memory is span:
        return {id(buffer): buffer for buffer in group}
    return {
        id(each): memory.as_strided(each.shape, each.stride(), each.storage_offset() - start)
        for each in group
    }
