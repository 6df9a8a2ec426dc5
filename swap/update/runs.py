"""Parts of components that lie side by side, joined to runs of one request each: pure, no I/O.

Components of a small subgroup are short, and a request costs the processors as much for 16 KiB as
for 4 MiB. ``swap.plan.slots`` says which of them are to lie side by side; whether they do is seen
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from swap.plan.slots import MOST_BYTES
from swap.storage.extents import Extent


class Part(NamedTuple):
    """``nbytes`` of a component, from byte ``start`` of its extent and byte ``place`` of a slot."""

    name: str
    extent: Extent
    start: int
    place: int
    nbytes: int


@dataclass(slots=True)
class Run:
    """Parts one right behind the other in the slot and in a file, ``nbytes`` in all."""

    parts: list[Part]
    nbytes: int

    @property
    def place(self) -> slice:
        """In the slot."""
        return slice(self.parts[0].place, self.parts[0].place + self.nbytes)

    @property
    def source(self) -> tuple[Extent, int]:
        """An extent that covers all of them, and the byte in it that they begin with."""
        _, extent, start, _, nbytes = self.parts[0]
        if nbytes == self.nbytes:
            return extent, start
        return Extent(extent.directory, extent.offset + start, self.nbytes), 0

    @property
    def names(self) -> str:
        return " ".join([part.name for part in self.parts])

    @property
    def purposes(self) -> dict[str, int]:
        """For what how many of the bytes are, see ``swap.timeline``."""
        purposes: dict[str, int] = {}
        for part in self.parts:
            purpose = "weights" if part.name == "weight" else "state"
            purposes[purpose] = purposes.get(purpose, 0) + part.nbytes
        return purposes


def runs_of(parts: Iterable[Part]) -> list[Run]:
    """``parts``, which are in the order of the slot, as few runs of at most ``MOST_BYTES``; a part
    is never divided. One whose extent is put together from several goes by itself.
    """
    runs: list[Run] = []
    for part in parts:
        if runs and runs[-1].nbytes + part.nbytes <= MOST_BYTES and _meet(runs[-1].parts[-1], part):
            runs[-1].parts.append(part)
            runs[-1].nbytes += part.nbytes
        else:
            runs.append(Run([part], part.nbytes))
    return runs


def _meet(one: Part, other: Part) -> bool:
    """Whether ``other`` begins where ``one`` ends, in both places."""
    before, behind = one.extent, other.extent
    return (
        one.place + one.nbytes == other.place
        and before.offset + one.start + one.nbytes == behind.offset + other.start
        and before.directory == behind.directory
        and not (before.pieces or behind.pieces)
    )
