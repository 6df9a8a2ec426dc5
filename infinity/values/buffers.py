"""Buffers of a model (statistics, masks): on the device, in the compute dtype, inside the block."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from aio.process.threads import Latch
from checkpoint.format.checksum import crc32c
from checkpoint.format.slices import may_overlap_itself, span_elements
from infinity.parameters.first_values import Values
from infinity.parameters.offloaded.placeholders import is_placeholder, refuse
from swap.plain import bits_of

_Place: TypeAlias = tuple[int, str]
"""The ``id`` of a module that is kept alive, and the name of a buffer there."""
_open: list[BufferConversion] = []
"""Of blocks that have begun, in this order: their models may have modules in common."""


@dataclass(slots=True)
class _Converted:
    """A buffer: where it is, as it was, and what stands for it inside."""

    module: nn.Module
    name: str
    before: torch.Tensor
    inside: torch.Tensor
    made_of: torch.Tensor
    """What ``inside`` was converted from, to see what was changed."""
    given: torch.Tensor | None
    """The values that it came with, where they are rounded inside and are not in ``before``."""
    sums: tuple[object, object] | None
    """Of ``before`` and ``inside``, made of it: torch counts no change by ``batch_norm``."""

    @property
    def is_ahead(self) -> bool:
        """Whether ``before`` was changed, by another model that has it, and ``inside`` was not."""
        was = self.sums
        return was is not None and was[0] != _sum(self.made_of) and was[1] == _sum(self.inside)

    @property
    def came(self) -> torch.Tensor:
        """What elements are that nothing changed."""
        return self.before if self.given is None else self.given


class BufferConversion:
    """Context manager: converts on entry as ``module.to(device, dtype)`` does, but that buffers
    which lie in one another's memory still do inside; back on exit with the values they have.
    Elements that nothing changed meanwhile have the bits that they came with (from ``values``), and
    what was changed in place is then the tensor that it was, so that views of it from before the
    block have these values, too; one that only another model changed, which has it as well, keeps
    that. Where the block has not ``begun`` they are as they were. A tensor that a program put there
    is one of its own afterwards, in all places of it, and one that it put in the place of another
    is there what it was. One that has no values, being a view of weights that were changed since,
    stays, and is refused by name when all others are back.

    Blocks whose models have buffers in common end in any order: one that began later uses its own
    until it ends, and what an earlier one gives back is what the later one is to give back.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None,
        values: Values,
        begun: Latch,
    ) -> None:
        self._model = model
        self._begun = begun
        self._device = device
        self._dtype = dtype
        self._values = values
        self._converted: dict[_Place, _Converted] = {}

    def __enter__(self) -> None:
        _open.append(self)
        found: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    found.append((module, name, buffer, self._values.buffer(full, buffer)))
        reals = _sharing_as_before(
            [buffer for *_, buffer, _ in found],
            [real for *_, real in found],
            [name not in module._non_persistent_buffers_set for module, name, *_ in found],
        )
        converted = _converted(reals, self._convert)
        for (module, name, buffer, _), real in zip(found, reals, strict=True):
            inside = converted[id(real)]
            given = None if real is buffer or buffer.is_meta or inside.dtype == real.dtype else real
            made_of = buffer if given is None else given
            sums = (_sum(buffer), _sum(inside)) if real is buffer is not inside else None
            self._converted[id(module), name] = _Converted(
                module, name, buffer, inside, made_of, given, sums
            )
            module._buffers[name] = inside

    def __exit__(self, *_: object) -> None:
        if self in _open:  # what is there behind that may be a later block's
            self._give_back()
        left = [self._now(place) for place in self._converted if self._begun.is_set()]
        if self in _open:  # this may be called again
            _open.remove(self)
        for buffer in left:
            if buffer is not None and is_placeholder(buffer):
                refuse(buffer)

    def _give_back(self) -> None:
        if not self._begun.is_set():
            for place, each in self._converted.items():
                self._put(place, each.before)
            return
        owners = {id(c.inside): c for c in self._converted.values() if not c.before.is_meta}
        aliased = self._by_elements()
        # What stood for one buffer may have been put in the place of another.
        ended = [
            (place, each if buffer is each.inside else owners.get(id(buffer), each), buffer)
            for place, each in self._converted.items()
            if (buffer := _original(self._now(place), owners, aliased)) is not None
            and buffer is not each.before
            and not is_placeholder(buffer)
            and not buffer.is_meta  # a program's
        ]
        # All before the first is written: one may lie in the memory of another.
        changes = [self._changes(each, buffer) for _, each, buffer in ended]
        new: dict[tuple[int, int], torch.Tensor] = {}  # one for all places of one
        theirs: dict[int, torch.Tensor] = {}
        for (_, each, buffer), changed in zip(ended, changes, strict=True):
            is_made = id(buffer) in theirs and not theirs[id(buffer)].is_meta
            if buffer is not each.inside and not is_made:
                theirs[id(buffer)] = _of_program(each, buffer, changed)
        for _, each, buffer in ended:
            if buffer is not each.inside:
                new[id(buffer), id(each.before)] = theirs[id(buffer)]
        written = {
            id(each.before)
            for (_, each, buffer), changed in zip(ended, changes, strict=True)
            if buffer is each.inside
            and changed is not None
            and not (each.given is None and _is_none(changed))  # it may be read-only
            and _write(each.before, _back(each.came, buffer, changed))
        }
        for (place, each, buffer), changed in zip(ended, changes, strict=True):
            key = id(buffer), id(each.before)
            if key not in new:
                new[key] = self._of_ours(each, buffer, changed, key[1] in written)
            self._put(place, new[key])

    def _by_elements(self) -> dict[object, torch.Tensor]:
        converted = (each for each in self._converted.values() if each.inside is not each.before)
        return {_elements(c.inside): c.inside for c in converted if _can_be_view(c.inside)}

    def _of_ours(
        self, each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None, is_written: bool
    ) -> torch.Tensor:
        before = each.before
        is_unchanged = each.given is None and _is_none(changed)
        # By what was written into another, maybe.
        if is_unchanged or is_written or self._is_back(each, buffer, changed):
            return before
        if _is_none(changed):
            return each.came.to(before.device)
        if changed is not None:
            return _back(each.came, buffer, changed).to(before.device)
        return buffer.to(before.device, before.dtype)

    def _now(self, place: _Place) -> torch.Tensor | None:
        """What is there for this block: a later one has put something of its own over it."""
        if (later := self._later(place)) is not None:
            return later._converted[place].before
        each = self._converted[place]
        return each.module._buffers.get(each.name)

    def _put(self, place: _Place, buffer: torch.Tensor) -> None:
        if (later := self._later(place)) is None:
            each = self._converted[place]
            each.module._buffers[each.name] = buffer
        else:
            later._stand_on(place, buffer)

    def _stand_on(self, place: _Place, buffer: torch.Tensor) -> None:
        """An earlier block has ended: what this one gives back is ``buffer``."""
        each = self._converted[place]
        if each.inside is each.before:
            if _kind(self._convert(buffer)) != _kind(each.inside):  # as made for the earlier block
                if each.module._buffers.get(each.name) is each.inside:
                    each.module._buffers[each.name] = buffer
                each.inside = buffer
            each.made_of = each.inside.clone()  # rounded by the earlier block, maybe
        each.before = buffer

    def _later(self, place: _Place) -> BufferConversion | None:
        """The next block that has begun after this one and has a buffer in the same place."""
        behind = _open[_open.index(self) + 1 :] if self in _open else []
        return next((one for one in behind if place in one._converted), None)

    def _changes(self, each: _Converted, buffer: torch.Tensor) -> torch.Tensor | None:
        """Which elements of ``buffer`` were changed, as a mask; None where that cannot be told."""
        if buffer is each.inside and each.is_ahead:
            return torch.zeros(1, dtype=torch.bool)
        changed = self._differing(each.made_of, buffer)
        return changed if changed is not None and changed.shape == each.came.shape else None

    def _is_back(
        self, each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None
    ) -> bool:
        """Whether the tensor from before the block has the values that it is to have."""
        if each.given is None:
            return _is_none(self._differing(each.before, buffer))
        if changed is None:
            return False
        values = _back(each.given, buffer, changed).to(each.before.device)
        can_tell = _kind(values) == _kind(each.before) and _has_bits(values)
        return can_tell and torch.equal(bits_of(values), bits_of(each.before))

    def _differing(self, before: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor | None:
        """Which elements of ``buffer`` are not what those of ``before`` are converted to, bit for
        bit, as a mask; None where that cannot be told.
        """
        if before.is_meta:
            return None
        came = self._convert(before)
        if _kind(buffer) != _kind(came) or not _has_bits(came):
            return None
        return (bits_of(buffer) != bits_of(came)).any(1).view(came.shape)

    def _convert(self, buffer: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype and buffer.is_floating_point() else buffer.dtype
        return buffer.to(self._device, dtype)


def _sum(tensor: torch.Tensor) -> object:
    if tensor.is_meta or not _has_bits(tensor):
        return None
    bits = bits_of(tensor).view(-1).to("cpu", copy=True)  # what numpy has seen cannot be resized
    return crc32c(bits.view(torch.uint8).numpy().data)


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    shape = None if tensor.is_nested else tensor.shape
    return shape, tensor.layout, tensor.dtype, tensor.device


def _has_bits(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _is_none(changed: torch.Tensor | None) -> bool:
    return changed is not None and not bool(changed.any())


def _back(came: torch.Tensor, buffer: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """The elements of ``buffer`` that were ``changed``, and of the others what they came with."""
    with torch.no_grad():
        return torch.where(changed.to(came.device), buffer.to(came.device, came.dtype), came)


def _original(
    buffer: torch.Tensor | None, own: Container[int], aliased: Mapping[object, torch.Tensor]
) -> torch.Tensor | None:
    """That of which ``buffer`` is another name, as ``detach`` and ``state_dict`` give one."""
    if buffer is None or id(buffer) in own or is_placeholder(buffer) or not _can_be_view(buffer):
        return buffer
    return aliased.get(_elements(buffer), buffer)


def _elements(tensor: torch.Tensor) -> object:
    steps = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), *steps, _kind(tensor)


def _of_program(
    each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None
) -> torch.Tensor:
    """What a tensor that a program put there is after the block: in the dtype that it chose, and
    never the tensor from before, which may be a buffer somewhere else.
    """
    before = each.before
    dtype = before.dtype if buffer.dtype == each.inside.dtype else buffer.dtype
    if changed is not None and (buffer.dtype, buffer.device) != (dtype, before.device):
        return _back(each.came, buffer, changed).to(before.device)
    return buffer.to(before.device, dtype)


def _write(before: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``before`` has these values now."""
    if before.is_inference() or may_overlap_itself(before.shape, before.stride()):
        return False
    with torch.no_grad():
        before.copy_(values)
    return True


def _sharing_as_before(
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
        if not _can_be_view(group[0]):  # one tensor in several places, such as one on meta
            # Of those on meta one that is not saved has what its module computes, and no file.
            last = max(given, key=lambda place: (is_saved[place], place))
            for place in taken:
                found[place] = values[last]
            continue
        pairs = [(values[place], buffers[place]) for place in given]
        if any(new.shape != old.shape or new.dtype != old.dtype for new, old in pairs):
            continue
        together = _converted_together(group, torch.clone)  # they stay as they are until the end
        for place in given:
            _write(together[id(buffers[place])], values[place])
        for place in taken:
            view = together[id(buffers[place])]
            # What cannot be written, as what `expand` gives, may be given values that no other has.
            is_written = place not in given or not may_overlap_itself(view.shape, view.stride())
            if is_written or torch.equal(view, values[place]):
                found[place] = view
    return found


def _converted(
    buffers: Iterable[torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    """What ``convert`` gives, by ``id``; of those that share memory, views of one tensor."""
    parts = (_converted_together(group, convert) for group in _groups(buffers))
    return {key: tensor for part in parts for key, tensor in part.items()}


def _groups(buffers: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Each of them once, those together that lie in one another's memory."""
    groups: list[list[torch.Tensor]] = []
    by_memory: dict[object, list[torch.Tensor]] = {}
    for buffer in {id(buffer): buffer for buffer in buffers}.values():
        if _can_be_view(buffer):
            memory = buffer.untyped_storage()._cdata, buffer.dtype
            by_memory.setdefault(memory, []).append(buffer)
        else:
            groups.append([buffer])
    for sharing in by_memory.values():
        groups += _overlapping(sharing)
    return groups


def _can_be_view(buffer: torch.Tensor) -> bool:
    if type(buffer) is not torch.Tensor or not _has_bits(buffer) or buffer.is_meta:
        return False
    return bool(buffer.numel()) and not (
        buffer.requires_grad or buffer.is_conj() or buffer.is_neg() or buffer.is_inference()
    )


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


def _converted_together(
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
