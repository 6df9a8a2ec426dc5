"""Records what a program does to the files below a directory.

Nothing in the program is patched, and nothing that goes through the kernel is overlooked: what
Python does, what C does, what processes do that the program starts. A call that may change files in
a way that is not known here is an error, and the tree that all recorded effects add up to has to be
the one that is there when the program has ended.

The program tells what it has promised by asking for a file that does not exist, see `say`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from crashes.disk import TOP, Barrier, Disk, History, Length, Names, Write
from crashes.tracing import Call, Opened, UnknownCallError, traced

_SAYINGS = "/crash-states/"
_UNKNOWN = (
    *("io_submit", "io_uring_enter", "copy_file_range", "sendfile", "splice", "pwritev2", "mknod"),
    *("mknodat", "symlink", "symlinkat", "truncate", "creat", "open", "msync"),
)


def say(word: str) -> None:
    """For the program: puts a word among its effects."""
    os.access(f"{_SAYINGS}{word}", os.F_OK)


def record(command: Sequence[str], top: Path, output: Path) -> History:
    """Runs a program and gives what it did below `top`, where there are empty directories alone.

    Raises RuntimeError for a program that fails, and for a record that is not what is there then.
    """
    recorder = _Recorder(top.resolve(), sorted(entry.name for entry in top.iterdir()))
    for call in traced(command, [*recorder.takes, *_UNKNOWN], output):
        recorder.take(call)
    _check_complete(recorder.history, top)
    return recorder.history


def _check_complete(history: History, top: Path) -> None:
    tree = Disk(history).tree(dict.fromkeys(range(len(history.effects))))
    recorded = {
        path: None if content is None else content.data for path, content in tree.contents.items()
    }
    found = {
        str(path.relative_to(top)): path.read_bytes() if path.is_file() else None
        for path in top.rglob("*")
    }
    for path in sorted(recorded.keys() | found.keys()):
        if path not in found or path not in recorded or recorded[path] != found[path]:
            raise RuntimeError(f"what was recorded of {path} is not what is there")


class _Recorder:
    """Makes a history of calls, and follows which names are which inodes meanwhile."""

    def __init__(self, top: Path, directories: Iterable[str]) -> None:
        self._top = top
        self._names: dict[tuple[int, str], int] = {}
        self._lengths: dict[int, int] = {}
        self._positions: dict[tuple[int, int], int] = {}
        """Where the next `write` goes, by inode and descriptor."""
        self.history = History({})
        for name in directories:
            self.history.directories[name] = self._names[TOP, name] = self._inode(True)
        self.takes: dict[str, Callable[[Call], None]] = {
            **dict.fromkeys(("access", "faccessat", "faccessat2"), self._said),
            "openat": self._open,
            **dict.fromkeys(("mkdir", "mkdirat"), self._make_directory),
            **dict.fromkeys(("rmdir", "unlink", "unlinkat"), self._remove),
            **dict.fromkeys(("rename", "renameat", "renameat2"), self._rename),
            **dict.fromkeys(("link", "linkat"), self._link),
            "ftruncate": self._truncate,
            "fallocate": self._allocate,
            **dict.fromkeys(("write", "writev"), self._write),
            **dict.fromkeys(("pwrite64", "pwritev"), self._write_at),
            "lseek": self._seek,
            **dict.fromkeys(("fsync", "fdatasync"), self._sync),
            **dict.fromkeys(("sync", "syncfs"), self._sync_all),
        }

    def take(self, call: Call) -> None:
        """Raises UnknownCallError."""
        if call.name in self.takes:
            if call.result >= 0 or self.takes[call.name] == self._said:
                self.takes[call.name](call)
        elif any(self._parts(path) is not None for path in _all_paths(call)):
            raise UnknownCallError(f"{call.name} is not among the calls that are understood")

    # Names.

    def _inode(self, is_directory: bool) -> int:
        inode = len(self.history.kinds)
        self.history.kinds[inode] = is_directory
        return inode

    def _parts(self, path: str | None) -> tuple[str, ...] | None:
        """The way to a path from the top; None outside of it."""
        if path is None or not Path(path).is_relative_to(self._top):
            return None
        return Path(path).relative_to(self._top).parts

    def _find(self, path: str | None) -> int | None:
        parts = self._parts(path)
        if parts is None:
            return None
        inode = TOP
        for part in parts:
            inode = self._names[inode, part]
        return inode

    def _place(self, path: str) -> tuple[int, str] | None:
        """The directory of a path and its name there."""
        parts = self._parts(path)
        if not parts:
            return None
        directory = self._find(str(self._top.joinpath(*parts[:-1])))
        assert directory is not None
        return directory, parts[-1]

    def _give(self, call: Call, what: str, given: dict[tuple[int, str], int | None]) -> None:
        for place, inode in given.items():
            if inode is None:
                self._names.pop(place, None)
            else:
                self._names[place] = inode
        self.history.add(Names(call.begin, call.end, what, given))

    def _make_directory(self, call: Call) -> None:
        path = call.paths[0]
        if place := self._place(path):
            self._give(call, self._called("make", path), {place: self._inode(True)})

    def _remove(self, call: Call) -> None:
        path = call.paths[0]
        if place := self._place(path):
            self._give(call, self._called("remove", path), {place: None})

    def _rename(self, call: Call) -> None:
        old, new = call.paths
        source, target = self._place(old), self._place(new)
        if (source is None) != (target is None) or "RENAME_EXCHANGE" in call.arguments:
            raise UnknownCallError(f"{call.name} of {old} to {new}")
        if source and target and self._names.get(target) != self._names[source]:
            what = self._called("rename", old, new)
            self._give(call, what, {target: self._names[source], source: None})

    def _link(self, call: Call) -> None:
        old, new = call.paths
        if place := self._place(new):
            self._give(call, self._called("link", old, new), {place: self._find(old)})

    def _called(self, verb: str, *paths: str) -> str:
        return f"{verb} {' as '.join(str(Path(path).relative_to(self._top)) for path in paths)}"

    # Contents.

    def _open(self, call: Call) -> None:
        opened = call.new
        if self._parts(opened.path) is None or opened.path is None:
            return
        if "O_APPEND" in call.arguments or "O_TMPFILE" in call.arguments:
            raise UnknownCallError(f"open({call.arguments})")
        place = self._place(opened.path)
        if place is not None and place not in self._names:
            inode = self._inode(False)
            self._lengths[inode] = 0
            self._give(call, self._called("create", opened.path), {place: inode})
        elif "O_TRUNC" in call.arguments:
            self._set_length(call, opened, 0, cuts=True)
        found = self._find(opened.path)
        assert found is not None
        self._positions[found, opened.number] = 0

    def _truncate(self, call: Call) -> None:
        self._set_length(call, call.opened[0], call.numbers[-1], cuts=True)

    def _allocate(self, call: Call) -> None:
        mode, offset, nbytes = call.numbers[-3:]
        if mode:
            raise UnknownCallError(f"fallocate({call.arguments})")
        self._set_length(call, call.opened[0], offset + nbytes, cuts=False)

    def _set_length(self, call: Call, opened: Opened, nbytes: int, *, cuts: bool) -> None:
        inode = self._find(opened.path)
        if inode is not None and opened.path is not None:
            what = self._called(f"length {nbytes} of", opened.path)
            self.history.add(Length(call.begin, call.end, what, inode, nbytes, cuts))

    def _write(self, call: Call) -> None:
        opened = call.opened[0]
        inode = self._find(opened.path)
        if inode is not None:
            position = self._positions[inode, opened.number]
            self._positions[inode, opened.number] += call.result
            self._put(call, opened, position)

    def _write_at(self, call: Call) -> None:
        self._put(call, call.opened[0], call.numbers[-1])

    def _put(self, call: Call, opened: Opened, offset: int) -> None:
        inode = self._find(opened.path)
        if inode is not None and opened.path is not None:
            data = b"".join(call.strings)[: call.result]
            what = self._called(f"write {len(data)} at {offset} of", opened.path)
            self.history.add(Write(call.begin, call.end, what, inode, offset, data))

    def _seek(self, call: Call) -> None:
        opened = call.opened[0]
        inode = self._find(opened.path)
        if inode is not None:
            self._positions[inode, opened.number] = call.result

    # What becomes durable, and what is said.

    def _sync(self, call: Call) -> None:
        inode = self._find(call.opened[0].path)
        if inode is not None:
            self.history.sync(inode, call.begin, call.end)

    def _sync_all(self, call: Call) -> None:
        self.history.sync(None, call.begin, call.end)

    def _said(self, call: Call) -> None:
        path = os.fsdecode(call.strings[0])
        if path.startswith(_SAYINGS):
            self.history.barriers.append(Barrier(call.end, path.removeprefix(_SAYINGS)))


def _all_paths(call: Call) -> list[str | None]:
    return [*(opened.path for opened in call.opened), *map(os.fsdecode, call.strings)]
