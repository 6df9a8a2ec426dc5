"""How a step changes parameters, subgroup by subgroup, wherever their weights are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from infinity.adamw.local_tensors import copy_elements
from infinity.adamw.step import MemberUpdate, Step
from infinity.adamw.tiers.loads import Piece, Wanted, loads_of
from swap.device.link import Item, Link, Load, Place
from swap.plain import is_plain, plain
from swap.plan.layout import Segment
from swap.plan.rules import UpdateRule

_COMPARED_ELEMENTS = 32 * 1024
"""Of a master and its weights at once, by copies that leave no holes in the heap."""
TRANSFER_ELEMENTS = 256 * 1024
"""Elements of weights and gradients that are brought to the host at once from a device to which
there is no link.
"""
TRANSFER_BYTES = TRANSFER_ELEMENTS * (4 + 4)


class _Expected(NamedTuple):
    """A load of a subgroup that is to be worked on, and the pieces that its items are."""

    link: Link
    load: Load
    pieces: tuple[Piece, ...]


class Updater:
    """Applies a rule to weights wherever they are. Those of a device to which there is one of
    ``links`` pass it in loads, ahead of the work on them; those of another device are copied in
    pieces, by way of two buffers on the host.
    """

    def __init__(self, rule: UpdateRule, links: Mapping[torch.device, Link]) -> None:
        self._rule = rule
        self._links = links
        self._expected: deque[tuple[Sequence[Segment], list[_Expected]]] = deque()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ordered: torch.Tensor | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether it is to ``expect`` subgroups."""
        return bool(self._links)

    @property
    def kept(self) -> set[int]:
        """Parameters whose new weights did not get to their device; ``finish`` brings them."""
        return set().union(*(link.kept for link in self._links.values()))

    def finish(self) -> None:
        """Wait until all new weights are on their devices. Raises what these raise."""
        for link in self._links.values():
            link.finish()

    def abandon(self) -> None:
        """After an error, which is on its way: nothing is under way any more, as far as devices
        say so.
        """
        self._expected.clear()
        for link in self._links.values():
            link.abandon()

    def forget(self) -> None:
        """The step is given up for which something is ``kept``: when this returns nothing of it is
        under way, and nothing is held. Raises what devices raise; all is kept still then.
        """
        for link in self._links.values():
            link.settle()
        for link in self._links.values():
            link.forget()

    def end_step(self) -> None:
        """Give back what a step takes for gradients that lie in another order."""
        self._ordered = None

    def expect(self, step: Step, segments: Sequence[Segment]) -> None:
        """``work`` on this subgroup comes after that on all others that are expected."""
        wanted: dict[Link, list[Wanted]] = {}
        for segment in segments:
            update = step.updates.get(segment.parameter)
            link = None if update is None else self._link_of(update)
            if update is not None and link is not None:
                sizes = update.weight.itemsize, update.gradient.itemsize
                done = step.done.get(segment, 0)
                wanted.setdefault(link, []).append(Wanted(segment, done, *sizes))
        expected = [
            _Expected(link, Load([_item(step, piece) for piece in pieces]), pieces)
            for link, some in wanted.items()
            for pieces in loads_of(some, link.slot_bytes)
        ]
        self._expected.append((segments, expected))
        for one in expected:
            one.link.expect([one.load])

    def work(
        self, step: Step, segments: Sequence[Segment], components: Mapping[str, torch.Tensor]
    ) -> None:
        """Update every segment of a subgroup that has an update, from where it was stopped."""
        for segment in segments:
            update = step.updates.get(segment.parameter)
            if update is None or self._link_of(update) is not None:
                continue
            for piece in _pieces(segment, update):
                if piece.start >= step.done.get(segment, 0):
                    here = _part_of(components, segment, piece)
                    self._piece(step, segment, update, piece, here)
                    step.done[segment] = piece.stop
        if self.looks_ahead:
            expected_segments, expected = self._expected.popleft()
            assert expected_segments is segments
            for one in expected:
                self._load(step, one, components)

    def _load(self, step: Step, one: _Expected, components: Mapping[str, torch.Tensor]) -> None:
        """Each piece is whole when it is counted; new weights are kept in the slot till they are
        up.
        """
        link, load, pieces = one
        link.arrive(load)
        for piece, item in zip(pieces, load.items, strict=True):
            segment = piece.segment
            here = _part_of(components, segment, slice(piece.start, piece.stop))
            update = step.updates[segment.parameter]
            self._apply(segment, update, here, load.weight(item), load.gradient(item))
            load.num_changed += 1
            step.done[segment] = piece.stop
        link.leave(load)

    def _link_of(self, update: MemberUpdate) -> Link | None:
        """Through which the bytes of its weights pass."""
        device = update.weight.device
        if not self._links or update.gradient.device != device or not is_plain(update.weight):
            return None
        return self._links.get(device)

    def _piece(
        self,
        step: Step,
        segment: Segment,
        update: MemberUpdate,
        piece: slice,
        components: dict[str, torch.Tensor],
    ) -> None:
        """All or, where it raises, nothing that matters to a second try; else ``step`` is torn."""
        part = slice(segment.start + piece.start, segment.start + piece.stop)
        weight = update.weight[part]
        here = self._on_host(0, weight)
        self._apply(segment, update, components, here, self._gradient(update.gradient, part))
        if here is not weight:
            step.torn = update.member.name
            weight.copy_(here)
            step.torn = None

    def _apply(
        self,
        segment: Segment,
        update: MemberUpdate,
        components: dict[str, torch.Tensor],
        weight: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """To a piece of ``segment``, all of whose tensors are on the host."""
        if update.begins:
            for component in components.values():
                component.zero_()
        if "master" in components:
            follow_weight(components["master"], weight)
        self._rule.apply(segment, update.update, components | {"weight": weight}, gradient, 1.0)

    def _gradient(self, gradient: torch.Tensor, part: slice) -> torch.Tensor:
        """Those of its elements, on the host."""
        if gradient.is_contiguous():
            return self._on_host(1, gradient.view(-1)[part])
        if self._ordered is None:  # one for all: many would leave holes in the heap
            self._ordered = torch.empty(TRANSFER_ELEMENTS * 4, dtype=torch.uint8, device="cpu")
        out = self._ordered.view(gradient.dtype)[: part.stop - part.start]
        copy_elements(gradient, part.start, out)
        return out

    def _on_host(self, which: int, values: torch.Tensor) -> torch.Tensor:
        """``values`` themselves, or a copy on the host whose bytes are the values."""
        if values.device.type == "cpu":
            return plain(values)
        if self._buffers is None:
            nbytes = TRANSFER_ELEMENTS * 4
            self._buffers = (
                torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
                torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
            )
        buffer = self._buffers[which].view(values.dtype)[: values.numel()]
        buffer.copy_(values)
        return buffer


def _part_of(
    components: Mapping[str, torch.Tensor], segment: Segment, piece: slice
) -> dict[str, torch.Tensor]:
    """What a piece of a segment has of the components of its subgroup."""
    part = slice(segment.offset + piece.start, segment.offset + piece.stop)
    return {name: component[part] for name, component in components.items()}


def _item(step: Step, piece: Piece) -> Item:
    segment, update = piece.segment, step.updates[piece.segment.parameter]
    part = slice(segment.start + piece.start, segment.start + piece.stop)
    numel = part.stop - part.start
    return Item(
        parameter=segment.parameter,
        weight=update.weight[part],
        gradient=partial(_elements_of, update.gradient, part),
        weight_place=Place(piece.weight_start, numel, update.weight.dtype),
        gradient_place=Place(piece.gradient_start, numel, update.gradient.dtype),
    )


def _elements_of(gradient: torch.Tensor, part: slice) -> torch.Tensor:
    """Those of its elements, flat, on its device: a copy only where they do not lie so."""
    if gradient.is_contiguous() and is_plain(gradient):
        return gradient.view(-1)[part]
    out = torch.empty(part.stop - part.start, dtype=gradient.dtype, device=gradient.device)
    copy_elements(gradient, part.start, out)
    return out


def _pieces(segment: Segment, update: MemberUpdate) -> Iterator[slice]:
    """Of its elements: all at once where nothing is copied. Copies are smaller than what saves are
    staged in, which is free during a step.
    """
    gradient = update.gradient
    is_copied = not (_is_plain_on_host(update.weight) and _is_plain_on_host(gradient))
    is_copied = is_copied or not gradient.is_contiguous()
    size = TRANSFER_ELEMENTS if is_copied else segment.length
    for start in range(0, segment.length, max(1, size)):
        yield slice(start, min(start + size, segment.length))


def _is_plain_on_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu" and is_plain(values)


def follow_weight(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Set the elements of ``master`` whose weights were changed by somebody else, exactly.

    The others keep what the master has beyond the weights.
    """
    for start in range(0, len(master), _COMPARED_ELEMENTS):
        part = slice(start, start + _COMPARED_ELEMENTS)
        ours, theirs = master[part], weight[part]
        changed = ours.to(theirs.dtype).view(torch.int16) != theirs.view(torch.int16)
        torch.where(changed, theirs.to(ours.dtype), ours, out=ours)
