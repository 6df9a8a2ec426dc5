"""Snapshots as they are on the disk: their names, what they say of themselves, which there are."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import checkpoint
from aio import sync_directory
from aio.process.absence import is_there
from checkpoint.directory.generations import remove_checkpoint
from checkpoint.directory.locate import read_manifest
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from infinity.snapshots.sources import POINT_FORMAT
from swap.snapshots.contents import Contents, decode
from swap.snapshots.sums import Sums, decode_sums
from swap.storage.extents import Extent

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What ``offloaded.snapshots()`` says of one snapshot.

    ``step``: the most steps that a parameter had taken; ``time``: when it was taken, in UTC, by
    the clock of the machine. ``nbytes`` is what it keeps on the SSDs, ``written_bytes`` of them
    were written for it: what was in host memory. Snapshots may share the rest among them and with
    the state of now.
    """

    name: str
    time: datetime
    step: int
    nbytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a snapshot says of itself. ``number`` grows from one to the next; ``model`` tells whose
    it is.
    """

    name: str
    number: int
    model: str
    time_ns: int
    step: int
    kept_bytes: int

    def to_tree(self) -> dict[str, Any]:
        return {"format": POINT_FORMAT} | {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class Entry:
    """A snapshot, and the extents that are pinned for it in this process."""

    folder: Path
    point: Point
    contents: Contents
    pinned: list[Extent] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def is_pinned(self) -> bool:
        """Whether all is that it has on NVMe."""
        return len(self.pinned) == len(self.contents.ranges)


def checked_name(name: object) -> str:
    """Raises ``TypeError`` and ``ValueError`` for what is no name of a snapshot."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a snapshot is a {type(name).__name__}; give text")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:120]!r} is no name of a snapshot: give 1 to 100 letters, digits, '.', '_' and "
            "'-', of which the first is a letter, a digit or '_'"
        )
    return name


def names_in(points: Path) -> list[str]:
    """Of all that may be snapshots. Raises ``OSError``: a folder that is not there is not one
    without snapshots.
    """
    return sorted(path.name for path in points.iterdir() if _NAME.fullmatch(path.name))


def listed(points: Path | None) -> list[Snapshot]:
    """The snapshots there are, the oldest first. One that is damaged, or of another version, is a
    warning. Raises ``OSError`` where it is not known which there are.
    """
    found = [] if points is None else [*_readable(points)]
    return [
        described(points / point.name, point)
        for point in sorted(found, key=lambda point: point.number)
        if points is not None
    ]


def _readable(points: Path) -> Iterator[Point]:
    names: list[str] = []
    with suppress(FileNotFoundError):  # the last one is just being dropped
        names = names_in(points)
    for name in names:
        try:
            yield read_twice(read_point, points / name)
        except (FileNotFoundError, IncompleteCheckpointError):
            continue  # being taken or dropped
        except (NotADirectoryError, ValueError) as error:
            _log.warning("the snapshot %s cannot be read: %s", name, error)


def read_twice(read: Callable[[Path], T], folder: Path) -> T:
    """What goes wrong the second time, too, is told: a read may fail once, or give what is not
    there.
    """
    try:
        return read(folder)
    except (OSError, CorruptCheckpointError):
        return read(folder)


def read_point(folder: Path) -> Point:
    """Raises as ``checkpoint.load``, and ``ValueError`` for one of another version."""
    told = checkpoint.load(folder, only=["point.*"])["point"]
    try:
        if told.pop("format") not in range(1, POINT_FORMAT + 1):
            raise TypeError("another format")
        point = Point(**told)
        _check(point)
    except (LookupError, TypeError) as error:
        raise ValueError(f"{folder} is a snapshot of another version of this library") from error
    if point.name != folder.name:
        raise ValueError(f"{folder} is a snapshot with the name {point.name:.200}; rename it back")
    return point


def _check(point: Point) -> None:
    """Raises ``TypeError`` for what no snapshot says of itself."""
    texts = (point.name, point.model)
    numbers = (point.number, point.time_ns, point.step, point.kept_bytes)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name that is no text")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise TypeError("a number that counts nothing")


def read_entry(folder: Path) -> Entry:
    """Raises as ``read_point``, and ``CorruptCheckpointError`` for damaged tables."""
    point = read_point(folder)
    tables = checkpoint.load(folder, only=["contents.*"])["contents"]
    try:
        return Entry(folder, point, decode(tables))
    except ValueError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from error


def read_sums(entry: Entry) -> Sums:
    """Of what it keeps on NVMe; of a snapshot that was taken without, none. Raises as
    ``read_entry``.
    """
    found = checkpoint.load(entry.folder, only=["sums.*"], strict=False)
    if "sums" not in found:
        return {}
    try:
        return decode_sums(entry.contents, found["sums"]["blocks"])
    except (ValueError, LookupError) as error:
        raise CorruptCheckpointError(f"{entry.folder}: {error}") from error


def remove_point(folder: Path) -> None:
    """Durably. One that cannot be read, too. Raises ``OSError``."""
    try:
        uuid = read_manifest(folder).uuid
    except (FileNotFoundError, IncompleteCheckpointError):
        uuid = None
    except (OSError, CorruptCheckpointError):
        (folder / MANIFEST_NAME).unlink()
        sync_directory(folder)
        shutil.rmtree(folder)
        uuid = None
    if is_there(folder):
        remove_checkpoint(folder, uuid)
    sync_directory(folder.parent)


def described(folder: Path, point: Point) -> Snapshot:
    """What users are told of one."""
    written = 0
    with suppress(OSError, ValueError):
        written = sum(file.nbytes for file in read_manifest(folder).files)
    return told_of(point, written)


def told_of(point: Point, written_bytes: int) -> Snapshot:
    """The same, of one for which so much was written."""
    return Snapshot(
        name=point.name,
        time=datetime.fromtimestamp(point.time_ns / 1e9, UTC),
        step=point.step,
        nbytes=point.kept_bytes + written_bytes,
        written_bytes=written_bytes,
    )
