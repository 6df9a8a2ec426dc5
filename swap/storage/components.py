"""The current place of every subgroup's components, and transfers of parts of them.

A component in HOST or on a device is an array, see ``arrays``. A component on NVME is an extent
that is never written again once it was published: an update publishes new extents. A component
whose values are all still zero (moments before the first step) has no extent and is never read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from aio import Operation, Slab
from swap.device.homes import DeviceHomes
from swap.interruptions.apart import run_apart
from swap.interruptions.mixture import Mixture
from swap.memory.passage import Passage, lies_as
from swap.plain import check_plain
from swap.plan.layout import PAGE, Component, Segment, Subgroup, parameters_at
from swap.plan.placement import Placement
from swap.plan.rules import UpdateRule
from swap.plan.sizes import components_of, nbytes_of
from swap.storage.arrays import Arrays
from swap.storage.extents import Extent, ExtentStore
from swap.storage.joined import run_together
from swap.storage.volumes import place_in
from swap.tiers import Tier


def as_tensor(buffer: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a slab buffer as a flat tensor that keeps the buffer alive."""
    if not buffer.size:
        return torch.empty(0, dtype=dtype, device="cpu")  # the strides of nothing cannot be viewed
    return torch.from_numpy(buffer).view(dtype)


def page_aligned(nbytes: int) -> torch.Tensor:
    """New memory that direct I/O can read into, flat bytes."""
    whole = np.empty(nbytes + PAGE, dtype=np.uint8)
    start = -whole.ctypes.data % PAGE
    return torch.from_numpy(whole[start : start + nbytes])


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a flat contiguous CPU tensor, as an array that keeps its storage alive.

    Raises ``ValueError`` for a tensor whose values are not its bytes.
    """
    check_plain("a tensor to be read as bytes", tensor)
    return np.asarray(tensor.view(torch.uint8).numpy())


class ComponentStore:
    """All components of a placement. Extents are swapped under a lock."""

    def __init__(
        self,
        placement: Placement,
        rule: UpdateRule,
        slab: Slab | None,
        extents: ExtentStore | None,
        passage: Passage | None,
        homes: DeviceHomes | None = None,
    ) -> None:
        self.layout = placement.layout
        self.mixture = Mixture([spec.name for spec in self.layout.specs])
        self._passage = passage
        self._home = placement.state_home
        self._extents = extents
        self._lock = threading.Lock()
        self._filling = threading.Lock()
        self._components = tuple(components_of(group, rule) for group in self.layout.subgroups)
        self._on_nvme: dict[tuple[int, str], Extent | None] = {}
        self.arrays = Arrays(placement, self._components, partial(_array_in, slab), homes)
        for group in self.layout.subgroups:
            if self._home[group.index] is Tier.NVME:
                self._allocate(group)
        if extents is not None:
            extents.transfers.tell_owner(self.owner_of)

    @property
    def nvme(self) -> ExtentStore:
        """Where components are that are there. Not to be asked for where none is."""
        assert self._extents is not None
        return self._extents

    @property
    def _bounce(self) -> Passage:
        """What memory that direct I/O does not take goes through."""
        assert self._passage is not None
        return self._passage

    def names(self, subgroup: int) -> tuple[str, ...]:
        """Names of the components of a subgroup, the weights first where they are kept."""
        return tuple(component.name for component in self._components[subgroup])

    def all_of(self, subgroup: int) -> tuple[Component, ...]:
        """The components of a subgroup, the weights first where they are kept."""
        return self._components[subgroup]

    def component(self, subgroup: int, name: str) -> Component:
        return next(component for component in self._components[subgroup] if component.name == name)

    def nbytes(self, subgroup: int) -> int:
        """What all components of a subgroup take, in whole pages each."""
        numel = self.layout.subgroups[subgroup].numel
        return nbytes_of(self._components[subgroup], numel)

    def is_array(self, subgroup: int) -> bool:
        """Whether its components are arrays, see ``arrays``; else they are on NVMe."""
        return self._home[subgroup] is not Tier.NVME

    def is_copied_on_write(self, subgroup: int) -> bool:
        """Whether an update may leave what is at home as it is until it is published."""
        return not self.is_array(subgroup) or self.arrays.on_host.has_spare(subgroup)

    def parted(self, groups: Iterable[Subgroup]) -> tuple[list[Subgroup], list[Subgroup]]:
        """What is updated at once, as a step is taken (what is small, and what is on a device,
        which does it behind), and the others.
        """
        parts: tuple[list[Subgroup], list[Subgroup]] = [], []
        for group in groups:
            is_at_once = group.always_on_host or self.arrays.is_on_device(group.index)
            parts[not is_at_once].append(group)
        return parts

    def extent(self, subgroup: int, name: str) -> Extent | None:
        """Where an NVME component is; None while it is all zeros."""
        with self._lock:
            return self._on_nvme[subgroup, name]

    def extents(self, subgroup: int) -> dict[str, Extent | None]:
        """As ``extent``, of all components."""
        with self._lock:
            return {
                component.name: self._on_nvme[subgroup, component.name]
                for component in self._components[subgroup]
            }

    def owner_of(self, directory: int, offset: int) -> str | None:
        """Whose the bytes there are, in words; None where nothing of here is."""
        with self._lock:
            published = [(key, extent) for key, extent in self._on_nvme.items() if extent]
        for (subgroup, name), extent in published:
            at = place_in(extent, directory, offset)
            if at is not None:
                component = self.component(subgroup, name)
                segments = self.layout.subgroups[subgroup].segments
                found = parameters_at(segments, component, at)
                names = [self.layout.specs[parameter].name for parameter in found]
                return f"{name} of {', '.join(names) or 'no parameter (padding)'}"
        return None

    def publish(self, subgroup: int, extents: Mapping[str, Extent]) -> None:
        """Replace the extents of some components at once and release the old ones."""
        with self._lock:
            old = [self._on_nvme[subgroup, name] for name in extents]
            self._on_nvme.update({(subgroup, name): new for name, new in extents.items()})
        self.nvme.release_all(extent for extent in old if extent is not None)

    def pin_all(self) -> dict[tuple[int, str], Extent | None]:
        """Pin every extent that is published; gives them by subgroup and component, None for what
        is all zeros. The caller has seen to it that no update is under way.
        """
        with self._lock:
            published = dict(self._on_nvme)
            extents = [extent for extent in published.values() if extent is not None]
            if extents:
                self.nvme.pin(extents, are_used=True)
        return published

    def adopt(self, subgroup: int, name: str, extent: Extent | None) -> None:
        """Let a pinned extent, or zeros, take the place of what is published; it is never written
        to. The caller drops what is cached.
        """
        with self._lock:
            old = self._on_nvme[subgroup, name]
            if old == extent:
                return
            if extent is not None:
                self.nvme.use(extent)
            self._on_nvme[subgroup, name] = extent
        if old is not None:
            self.nvme.release(old)

    def zero(self, name: str) -> None:
        """Make every component of that name all zeros, wherever it is; an interrupt comes before or
        after.
        """
        run_apart(partial(self._zero, name), "infinity-zero")

    def _zero(self, name: str) -> None:
        self.arrays.zero(name)
        for subgroup, component in self._on_nvme:
            if component == name:
                self._drop(subgroup, name)

    def read(self, parameter: int, name: str, start: int, out: torch.Tensor) -> None:
        """Copy values ``[start, start + len(out))`` of one component of a parameter into ``out``
        (flat, CPU).

        Raises ``AioError``; ``out`` is the caller's again then, too. The caller sees to it that no
        update is under way.
        """
        self._run_drained(partial(run_together, partial(self._read, parameter, name, start, out)))

    def _read(
        self, parameter: int, name: str, start: int, out: torch.Tensor, pending: list[Operation]
    ) -> None:
        for segment, low, part in self._overlaps(parameter, name, start, out):
            if self.is_array(segment.subgroup):
                self.arrays.read(segment.subgroup, name, low, part)
                continue
            extent = self.extent(segment.subgroup, name)
            if extent is None:
                part.zero_()
            else:
                self._start("read", extent, low, part, pending)

    def write(self, parameter: int, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrite values ``[start, start + len(values))`` of one component in place; of an extent
        that must stay as it is, in a copy that takes its place.

        For filling and loading, with no update under way; several threads may write different
        ones. Raises ``AioError``; ``values`` is the caller's again then, too.
        """
        begin = partial(self._write, parameter, name, start, values)
        self._run_drained(partial(run_together, begin))

    def _write(
        self, parameter: int, name: str, start: int, values: torch.Tensor, pending: list[Operation]
    ) -> None:
        for extent, low, part in self._set(parameter, name, start, values):
            self._start("write", extent, low, part, pending)

    def _set(
        self, parameter: int, name: str, start: int, values: torch.Tensor
    ) -> Iterator[tuple[Extent, int, torch.Tensor]]:
        """Set what is an array; (extent, first value in it, values) of what is to be written."""
        for segment, low, part in self._overlaps(parameter, name, start, values):
            if self.is_array(segment.subgroup):
                self.arrays.write(segment.subgroup, name, low, part)
            else:
                yield self._to_write(segment.subgroup, name), low, part

    def fill(self, parts: Iterable[tuple[int, str, int, torch.Tensor]], aside: Passage) -> None:
        """``write`` each of ``parts``, no element twice, behind the making of the next: from copies
        in ``aside``. Returns when all are written. Raises ``AioError`` and what ``parts`` raises.
        """
        self._run_drained(partial(self._fill, parts, aside))

    def _fill(self, parts: Iterable[tuple[int, str, int, torch.Tensor]], aside: Passage) -> None:
        with aside.behind() as write:
            for given in parts:
                for extent, low, part in self._set(*given):
                    first = low * part.dtype.itemsize
                    write(first, as_bytes(part), partial(self._write_from, extent, first))

    def _write_from(self, extent: Extent, first: int, at: int, memory: np.ndarray) -> Operation:
        return self.nvme.write(extent, first + at, memory)

    def _to_write(self, subgroup: int, name: str) -> Extent:
        """What is published of a component, to be written to."""
        with self._filling:
            extent = self.extent(subgroup, name)
            if extent is None or self.nvme.is_fixed(extent):
                # Apart, so that an interrupt leaves no extent to nobody.
                renew = self._fill_with_zeros if extent is None else self._copy
                run_apart(partial(renew, subgroup, name), "infinity-fill")
                extent = self.extent(subgroup, name)
            assert extent is not None
            return extent

    def _copy(self, subgroup: int, name: str) -> None:
        """Publish another extent with the same bytes."""
        old = self.extent(subgroup, name)
        assert old is not None
        new = self.nvme.allocate(old.nbytes)
        try:
            self.nvme.run_drained(partial(self._copy_bytes, old, new))
        except BaseException:
            self.nvme.release(new)
            raise
        self.publish(subgroup, {name: new})

    def _copy_bytes(self, old: Extent, new: Extent) -> None:
        # What is damaged stays known as that, until its new values are written.
        self._bounce.copy(
            old.nbytes,
            partial(self._transfer, "read as is", old),
            partial(self._transfer, "write", new),
        )
        self.nvme.transfers.note_sums(new, self.nvme.transfers.sums(old))

    def _run_drained(self, action: Callable[[], None]) -> None:
        if self._extents is None:
            action()
        else:
            self._extents.run_drained(action)

    def _overlaps(
        self, parameter: int, name: str, start: int, tensor: torch.Tensor
    ) -> Iterator[tuple[Segment, int, torch.Tensor]]:
        """(segment, first value in its subgroup, slice of ``tensor``) for all that the range
        touches.
        """
        stop = start + tensor.numel()
        for segment in self.layout.segments_of[parameter]:
            component = self.component(segment.subgroup, name)
            here = component.part(segment.start, segment.length)
            low, high = max(start, here.start), min(stop, here.stop)
            if low < high:
                at = segment.offset // component.per + low - here.start
                yield segment, at, tensor[low - start : high - start]

    def _start(
        self, kind: str, extent: Extent, first: int, part: torch.Tensor, pending: list[Operation]
    ) -> None:
        """Transfer ``part``: as it is, which is ``pending`` then, or through the passage."""
        start, memory = first * part.dtype.itemsize, as_bytes(part)
        if lies_as(start, memory):
            pending.append(self._transfer(kind, extent, start, memory))
            return
        way = self._bounce.read if kind == "read" else self._bounce.write
        way(start, memory, lambda at, buffer: self._transfer(kind, extent, start + at, buffer))

    def _transfer(self, kind: str, extent: Extent, start: int, memory: np.ndarray) -> Operation:
        if kind.startswith("read"):
            as_is = kind == "read as is"
            return self.nvme.read(extent, start, memory, urgent=True, as_is=as_is)
        return self.nvme.write(extent, start, memory)

    def _allocate(self, group: Subgroup) -> None:
        for component in self._components[group.index]:
            extent = None
            if not component.zero:
                extent = self.nvme.allocate(component.nbytes(group.numel))
            self._on_nvme[group.index, component.name] = extent

    def _fill_with_zeros(self, subgroup: int, name: str) -> None:
        nbytes = self.component(subgroup, name).nbytes(self.layout.subgroups[subgroup].numel)
        extent = self.nvme.allocate(nbytes)
        try:
            if not self.nvme.transfers.zero(extent):
                self._bounce.write_zeros(nbytes, partial(self._transfer, "write", extent))
        except BaseException:
            self.nvme.release(extent)
            raise
        self.publish(subgroup, {name: extent})

    def _drop(self, subgroup: int, name: str) -> None:
        with self._lock:
            extent, self._on_nvme[subgroup, name] = self._on_nvme[subgroup, name], None
        if extent is not None:
            self.nvme.release(extent)


def _array_in(slab: Slab | None, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    assert slab is not None
    return as_tensor(slab.allocate(nbytes), dtype)
