"""Buffers of a model (statistics, masks): on the device, in the compute dtype, inside the block."""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from aio.process.threads import Latch
from infinity.parameters.first_values import Values
from infinity.parameters.offloaded.placeholders import is_placeholder, refuse
from infinity.values.buffers.sharing import convert_together, sharing_as_before
from infinity.values.buffers.tensors import (
    are_same,
    can_be_view,
    checksum,
    elements_of,
    has_bits,
    is_none,
    kind_of,
    merged,
    write,
)
from swap.interruptions.forks import note
from swap.plain import bits_of

_Place: TypeAlias = tuple[int, str]
"""The ``id`` of a module that is kept alive, and the name of a buffer there."""
_open: list[BufferConversion] = []
"""Of blocks that have begun, in this order: their models may have modules in common."""


class _Turns:
    """Blocks of several threads begin and end one after the other: each goes by what others have
    put there.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        note(self)

    def after_fork(self) -> None:
        self.lock = threading.RLock()  # another thread may have had it


_turns = _Turns()


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
    dtype: torch.dtype
    """Of ``inside`` as the block began, and so of what a program made of it: ``inside`` is of
    another where an earlier block has ended since.
    """

    @property
    def is_ahead(self) -> bool:
        """Whether ``before`` was changed, by another model that has it, and ``inside`` was not."""
        was = self.sums
        return (
            was is not None and was[0] != checksum(self.made_of) and was[1] == checksum(self.inside)
        )

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
        with _turns.lock:
            self._convert_all()

    def _convert_all(self) -> None:
        _open.append(self)
        found: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    found.append((module, name, buffer, self._values.buffer(full, buffer)))
        reals = sharing_as_before(
            [buffer for *_, buffer, _ in found],
            [real for *_, real in found],
            [name not in module._non_persistent_buffers_set for module, name, *_ in found],
        )
        converted = convert_together(reals, self._convert)
        for (module, name, buffer, _), real in zip(found, reals, strict=True):
            inside = converted[id(real)]
            given = None if real is buffer or buffer.is_meta or inside.dtype == real.dtype else real
            made_of = buffer if given is None else given
            sums = (checksum(buffer), checksum(inside)) if real is buffer is not inside else None
            self._converted[id(module), name] = _Converted(
                module, name, buffer, inside, made_of, given, sums, inside.dtype
            )
            module._buffers[name] = inside

    def __exit__(self, *_: object) -> None:
        with _turns.lock:
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
            and not (each.given is None and is_none(changed))  # it may be read-only
            and write(each.before, merged(each.came, buffer, changed))
        }
        for (place, each, buffer), changed in zip(ended, changes, strict=True):
            key = id(buffer), id(each.before)
            if key not in new:
                new[key] = self._of_ours(each, buffer, changed, key[1] in written)
            self._put(place, new[key])

    def _by_elements(self) -> dict[object, torch.Tensor]:
        converted = (each for each in self._converted.values() if each.inside is not each.before)
        return {elements_of(c.inside): c.inside for c in converted if can_be_view(c.inside)}

    def _of_ours(
        self, each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None, is_written: bool
    ) -> torch.Tensor:
        before = each.before
        is_unchanged = each.given is None and is_none(changed)
        # By what was written into another, maybe.
        if is_unchanged or is_written or self._is_back(each, buffer, changed):
            return before
        if is_none(changed):
            return each.came.to(before.device)
        if changed is not None:
            return merged(each.came, buffer, changed).to(before.device)
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
        was = each.inside
        if was is each.before:
            if kind_of(self._convert(buffer)) != kind_of(was):  # as made for the earlier block
                each.inside = buffer
            each.made_of = each.inside.clone()  # rounded by the earlier block, maybe
        each.before = buffer
        if each.inside is was:
            return
        if (later := self._later(place)) is not None and later._converted[place].before is was:
            later._stand_on(place, buffer)
        elif later is None and each.module._buffers.get(each.name) is was:
            each.module._buffers[each.name] = buffer

    def _later(self, place: _Place) -> BufferConversion | None:
        """The next block that has begun after this one and has a buffer in the same place."""
        behind = _open[_open.index(self) + 1 :] if self in _open else []
        return next((one for one in behind if place in one._converted), None)

    def _changes(self, each: _Converted, buffer: torch.Tensor) -> torch.Tensor | None:
        """Which elements of ``buffer`` were changed, as a mask; None where that cannot be told."""
        if buffer is each.inside and each.is_ahead:
            return torch.zeros(1, dtype=torch.bool)
        changed = self._differing(each.made_of, buffer, each.dtype)
        return changed if changed is not None and changed.shape == each.came.shape else None

    def _is_back(
        self, each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None
    ) -> bool:
        """Whether the tensor from before the block has the values that it is to have."""
        if each.given is None:
            return is_none(self._differing(each.before, buffer))
        if changed is None:
            return False
        values = merged(each.given, buffer, changed).to(each.before.device)
        return are_same(values, each.before)

    def _differing(
        self, before: torch.Tensor, buffer: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """Which elements of ``buffer`` are not what those of ``before`` are converted to (to
        ``dtype``, if that is what it has), bit for bit, as a mask; None where that cannot be told.
        """
        if before.is_meta:
            return None
        came = self._convert(before)
        if buffer.dtype == dtype != came.dtype:
            came = came.to(dtype)
        if kind_of(buffer) != kind_of(came) or not has_bits(came):
            return None
        return (bits_of(buffer) != bits_of(came)).any(1).view(came.shape)

    def _convert(self, buffer: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype and buffer.is_floating_point() else buffer.dtype
        return buffer.to(self._device, dtype)


def _original(
    buffer: torch.Tensor | None, own: Container[int], aliased: Mapping[object, torch.Tensor]
) -> torch.Tensor | None:
    """That of which ``buffer`` is another name, as ``detach`` and ``state_dict`` give one."""
    if buffer is None or id(buffer) in own or is_placeholder(buffer) or not can_be_view(buffer):
        return buffer
    return aliased.get(elements_of(buffer), buffer)


def _of_program(
    each: _Converted, buffer: torch.Tensor, changed: torch.Tensor | None
) -> torch.Tensor:
    """What a tensor that a program put there is after the block: in the dtype that it chose, and
    never the tensor from before, which may be a buffer somewhere else.
    """
    before = each.before
    is_ours = buffer.dtype in (each.dtype, each.inside.dtype)
    dtype = before.dtype if is_ours else buffer.dtype
    values = buffer.to(before.device, dtype)
    if changed is None:
        return values
    # In the same dtype, too: an earlier block may have rounded what this one began with.
    exact = merged(each.came, buffer, changed).to(before.device)
    return values if are_same(values, exact) else exact
