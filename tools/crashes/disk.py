"""What a disk may hold when the power is cut, by what POSIX promises and nothing more.

What a program does is a list of effects, in the order in which they were asked for. An effect is
certain to be on the disk once an `fsync` that began behind its end has returned: of the file for
its bytes and its length, of the directory for its names, of every directory that it changes for a
`rename`. Until then it is there or is not, whatever came before or behind it, and of a write any of
its sectors may be there, zeros or what was there before in the place of the others. Only a rename
is atomic. File systems promise more (ext4 with the names of a new file at its first `fsync`, all of
them with an order of names); whatever they leave is among these states.

Invariants: inodes are numbers that are never used again; what cannot be reached from the top is
lost. An effect is applied by itself: a name is what the last effect on it that counts says, bytes
are those of the last write that counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

SECTOR_BYTES = 512
NEVER = 1 << 60
"""A moment that does not come."""
TOP = 0
"""The inode of the directory in which everything happens."""


@dataclass(slots=True)
class Effect:
    """Asked for at the moment `begin`, done at `end`, certain to be on the disk at `synced`."""

    begin: int
    end: int
    what: str
    """For people."""
    synced: int = field(default=NEVER, init=False)


@dataclass(slots=True)
class Names(Effect):
    """Names that get other inodes at once; None removes one. Keys are a directory and a name."""

    given: Mapping[tuple[int, str], int | None]

    @property
    def inodes(self) -> set[int]:
        return {directory for directory, _ in self.given}


@dataclass(slots=True)
class Write(Effect):
    """Bytes of a file, which becomes longer where they end behind its end."""

    inode: int
    offset: int
    data: bytes

    @property
    def inodes(self) -> set[int]:
        return {self.inode}

    @property
    def num_sectors(self) -> int:
        first = self.offset // SECTOR_BYTES
        return -(-(self.offset + len(self.data)) // SECTOR_BYTES) - first if self.data else 0


@dataclass(slots=True)
class Length(Effect):
    """The length of a file: what is longer is cut if `cuts`, what is shorter gets zeros."""

    inode: int
    nbytes: int
    cuts: bool

    @property
    def inodes(self) -> set[int]:
        return {self.inode}


AnyEffect = Names | Write | Length


@dataclass(frozen=True, slots=True)
class Barrier:
    """A moment from which on other states are possible: something became durable, or promised."""

    moment: int
    says: str = ""
    """What the program said then; empty where it was an `fsync`."""


@dataclass
class History:
    """Everything that a program did to a disk. `directories` were there before, by their paths."""

    directories: dict[str, int]
    effects: list[AnyEffect] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    kinds: dict[int, bool] = field(default_factory=lambda: {TOP: True})
    """Of each inode: whether it is a directory."""
    num_syncs: int = 0

    def add(self, effect: AnyEffect) -> None:
        self.effects.append(effect)

    def sync(self, inode: int | None, begin: int, end: int) -> None:
        """An `fsync` that came back well; of everything without an inode."""
        self.num_syncs += 1
        for effect in self.effects:
            if effect.end <= begin and (inode is None or inode in effect.inodes):
                effect.synced = min(effect.synced, end)
        self.barriers.append(Barrier(end))

    @cached_property
    def by_inode(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the effects on the content of each file."""
        found: dict[int, list[int]] = {}
        for number, effect in enumerate(self.effects):
            if not isinstance(effect, Names):
                found.setdefault(effect.inode, []).append(number)
        return found


Sectors = frozenset[int]
State = Mapping[int, Sectors | None]
"""The effects that are on the disk, by their numbers; of a write that is torn the sectors that are,
counted from its first one. The file is as long then as if it were whole."""


@dataclass(frozen=True, slots=True)
class Content:
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> Content:
        return cls(data, hashlib.blake2b(data, digest_size=16).digest())


@dataclass(frozen=True, slots=True)
class Tree:
    """What is found when the machine is up again: every path below the top and its inode, with the
    content of files and None for directories.
    """

    inodes: Mapping[str, int]
    contents: Mapping[str, Content | None]

    def digest(self) -> bytes:
        """The same for trees of the same names, contents and hard links."""
        seen: dict[int, int] = {}
        total = hashlib.blake2b(digest_size=16)
        for path in sorted(self.inodes):
            content = self.contents[path]
            same_as = seen.setdefault(self.inodes[path], len(seen))
            total.update(f"{path}\0{same_as}\0".encode())
            total.update(b"/" if content is None else content.digest)
        return total.digest()


class Disk:
    """The trees of a history's states. Contents of files are kept, since states share them."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._contents: dict[tuple[int, tuple[tuple[int, Sectors | None], ...]], Content] = {}

    def tree(self, state: State) -> Tree:
        folders: dict[int, dict[str, int]] = {TOP: {}}
        for path, inode in self._history.directories.items():
            folders[TOP][path] = inode
        for number in sorted(state):
            effect = self._history.effects[number]
            if isinstance(effect, Names):
                for (directory, name), inode_or_none in effect.given.items():
                    folder = folders.setdefault(directory, {})
                    if inode_or_none is None:
                        folder.pop(name, None)
                    else:
                        folder[name] = inode_or_none
        inodes = dict(self._walk(folders, TOP, ""))
        return Tree(inodes, {path: self._content(inode, state) for path, inode in inodes.items()})

    def _walk(
        self, folders: Mapping[int, Mapping[str, int]], directory: int, prefix: str
    ) -> Iterator[tuple[str, int]]:
        for name, inode in folders.get(directory, {}).items():
            path = f"{prefix}{name}"
            yield path, inode
            if self._history.kinds[inode]:
                yield from self._walk(folders, inode, f"{path}/")

    def _content(self, inode: int, state: State) -> Content | None:
        if self._history.kinds[inode]:
            return None
        numbers = self._history.by_inode.get(inode, ())
        key = inode, tuple((number, state[number]) for number in numbers if number in state)
        if key not in self._contents:
            data = bytearray()
            for number, sectors in key[1]:
                _apply(self._history.effects[number], data, sectors)
            self._contents[key] = Content.of(bytes(data))
        return self._contents[key]


def _apply(effect: AnyEffect, data: bytearray, sectors: Sectors | None) -> None:
    assert not isinstance(effect, Names)
    if isinstance(effect, Length):
        if effect.nbytes > len(data):
            data.extend(bytes(effect.nbytes - len(data)))
        elif effect.cuts:
            del data[effect.nbytes :]
        return
    end = effect.offset + len(effect.data)
    if end > len(data):
        data.extend(bytes(end - len(data)))
    for start, stop in _ranges(effect, sectors):
        data[start:stop] = effect.data[start - effect.offset : stop - effect.offset]


def _ranges(write: Write, sectors: Sectors | None) -> Iterator[tuple[int, int]]:
    end = write.offset + len(write.data)
    if sectors is None:
        yield write.offset, end
        return
    first = write.offset // SECTOR_BYTES
    for sector in sectors:
        start = (first + sector) * SECTOR_BYTES
        yield max(start, write.offset), min(start + SECTOR_BYTES, end)
