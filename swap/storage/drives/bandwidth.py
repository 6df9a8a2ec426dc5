"""How fast a directory reads and writes, by a short measurement with our own engine."""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aio import (
    AioError,
    Engine,
    File,
    NotRegularFileError,
    Request,
    Slab,
    naming,
    read_regular_file,
)
from aio.errors import is_no_room
from aio.process.descriptors import Descriptor
from swap.interruptions.undo import Undo
from swap.storage.drives.directory import (
    BANDWIDTH,
    FOLDER,
    SwapDirectory,
    locked,
    make_shared,
    open_to_others,
)

_PROBE_BYTES = 256 * 1024 * 1024
_REQUEST_BYTES = 8 * 1024 * 1024
_MOST_BYTES = 4096
"""More than any measurement takes as text."""
_LEAST_RATE, _MOST_RATE = 1.0, 1e15


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second."""

    read: float
    write: float

    def __add__(self, other: Bandwidth) -> Bandwidth:
        return Bandwidth(self.read + other.read, self.write + other.write)


def measure_and_keep(directory: str | os.PathLike[str]) -> Bandwidth:
    """Measure ``directory`` and keep the result in it, where ``offload`` looks for it.

    Raises ``OSError`` naming what cannot be written; links are not followed.
    """
    found = _measure_one(directory)
    folder = Path(directory) / FOLDER
    with locked(Path(directory)):  # else whoever reclaims took the new file for an abandoned one
        make_shared(folder)
        with naming(folder), Descriptor(folder, os.O_RDONLY | os.O_DIRECTORY, exact=True) as opened:
            _replace(opened.number, json.dumps({"read": found.read, "write": found.write}).encode())
    return found


def kept(directory: str | os.PathLike[str]) -> Bandwidth | None:
    """What ``measure_and_keep`` left in ``directory``; None if it never did.

    Raises ``ValueError`` naming the file if it is anything else, also a link or a pipe, and
    ``OSError`` if it cannot be read.
    """
    file = Path(directory) / FOLDER / BANDWIDTH
    try:
        content = read_regular_file(file, _MOST_BYTES + 1, follow=False)
    except FileNotFoundError:
        return None
    except NotRegularFileError as error:
        raise _not_a_measurement(file, "it is no regular file") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_a_measurement(file, "it is a link") from error
        raise
    return _parsed(file, content)


def _parsed(file: Path, content: bytes) -> Bandwidth:
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError("it is too long")
        values = json.loads(content)
        return Bandwidth(_rate(values["read"]), _rate(values["write"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_a_measurement(file, str(error)) from error


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not _LEAST_RATE <= value <= _MOST_RATE:  # NaN is neither
        raise ValueError(f"{value} bytes a second are no bandwidth")
    return float(value)


def _not_a_measurement(file: Path, reason: str) -> ValueError:
    return ValueError(
        f"{file} is not a measurement ({reason}); remove it, or run `infinity tune` again"
    )


def _replace(folder: int, content: bytes) -> None:
    """Put the file in place as a whole, whatever is there under its name."""
    part = f".{BANDWIDTH}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    made = Descriptor()
    try:
        made.open(part, flags, 0o644, exact=True, dir_fd=folder)
        open_to_others(made, 0o644)  # all users of the disk read it
        with open(made.number, "wb", closefd=False) as opened:
            opened.write(content)
        os.fsync(made.number)  # what has the name is whole, also behind a power cut
        os.replace(part, BANDWIDTH, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        if made.number >= 0:
            with suppress(FileNotFoundError):  # it is in its place already
                os.unlink(part, dir_fd=folder)
        raise
    finally:
        made.close()


def shares(directories: Sequence[str]) -> list[float] | None:
    """How much of the load each directory takes: by measured bandwidth if all are measured."""
    found = [kept(directory) for directory in directories]
    measured = [entry.read + entry.write for entry in found if entry is not None]
    return measured if len(measured) == len(directories) else None


def measure(directories: Sequence[str | os.PathLike[str]]) -> Bandwidth:
    """The sum over ``directories``, each measured alone: 256 MiB, or as much as there is room for,
    written, synced and read back.

    Raises ``OSError`` naming the directory if that fails. Nothing is left behind.
    """
    total = Bandwidth(0.0, 0.0)
    for directory in directories:
        total += _measure_one(directory)
    return total


def _measure_one(directory: str | os.PathLike[str]) -> Bandwidth:
    with Undo() as undo:
        engine = undo.enter_context(Engine())
        # As a swap file it is reclaimed by the next process, should this one be killed.
        place = SwapDirectory(directory, engine, undo)
        file = place.file
        nbytes = _allocated(file)
        buffer = Slab(_REQUEST_BYTES).allocate(_REQUEST_BYTES)
        offsets = range(0, nbytes, _REQUEST_BYTES)
        seconds = {}
        for kind in ("write", "read"):
            start = time.perf_counter()
            requests = [Request(kind, file, offset, buffer) for offset in offsets]
            for operation in engine.submit(requests):
                operation.result()
            if kind == "write":
                file.sync()
            seconds[kind] = time.perf_counter() - start
    return Bandwidth(nbytes / seconds["read"], nbytes / seconds["write"])


def _allocated(file: File) -> int:
    """How many bytes there is room to measure with."""
    nbytes = _PROBE_BYTES
    while True:
        try:
            file.allocate(0, nbytes)
            return nbytes
        except AioError as error:
            if not is_no_room(error):
                raise
            if nbytes // 2 < _REQUEST_BYTES:
                folder = file.path.parent
                reason = os.strerror(error.errno or 0)
                raise AioError(
                    f"cannot measure the bandwidth of {folder}: {reason}; it takes {nbytes} bytes "
                    "of room for a moment: free as much, or plan without nvme=",
                    errno=error.errno or 0,
                    filename=str(folder),
                    nbytes=nbytes,
                ) from error
        nbytes //= 2
