"""System calls of a program, as strace tells them: which, with which bytes, in which order.

Queues of the kernel (io_uring, libaio) carry data past the tracer. Their setup is made to fail, as
it does in many containers, and the library falls back to `pwrite` by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

QUEUES = ("io_setup", "io_uring_setup")
_BYTES = r"(?:\\x[0-9a-f]{2})*"
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(.*)", re.DOTALL)
_STRING = re.compile(rf'"({_BYTES})"(\.\.\.)?')
_OPENED = re.compile(rf"(\d+|AT_FDCWD)<({_BYTES})>(\(deleted\))?")
_NUMBERS = re.compile(r", (-?\d+)(?=,|$)")
_MAX_BYTES = 1 << 26
"""Of one string; what is longer is an error."""


class UnknownCallError(Exception):
    """A program did something that is not understood here."""


def unavailable_reason() -> str | None:
    """Why nothing can be traced here; None if it can."""
    if shutil.which("strace") is None:
        return "needs strace"
    command = ["strace", "-f", "--seccomp-bpf", "-e", "inject=getpid:retval=1", "true"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return None if done.returncode == 0 else f"strace cannot inject here: {done.stderr[:80]}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A descriptor and the path that it is open on; None for a file that has no name any more."""

    number: int
    path: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that came back, from the line at which it began to that at which it ended."""

    begin: int
    end: int
    name: str
    arguments: str
    result: int
    beyond: str
    """What stands behind the result: for a new descriptor its path."""

    @property
    def strings(self) -> list[bytes]:
        found = _STRING.findall(self.arguments)
        if any(is_cut for _, is_cut in found):
            raise UnknownCallError(f"{self.name} with more than {_MAX_BYTES} bytes")
        return [_decoded(text) for text, _ in found]

    @property
    def numbers(self) -> list[int]:
        """The arguments behind the first that are plain numbers."""
        return [int(number) for number in _NUMBERS.findall(self.arguments)]

    @property
    def opened(self) -> list[Opened]:
        """The descriptors among its arguments; AT_FDCWD is -1."""
        return _opened_in(self.arguments)

    @property
    def new(self) -> Opened:
        """The descriptor that it made."""
        return _opened_in(f"{self.result}{self.beyond}")[0]

    @property
    def paths(self) -> list[str]:
        """The paths that it names, looked up in the directories that it names with them."""
        folders = [opened.path or "" for opened in self.opened] or [""] * len(self.strings)
        if len(folders) == 1:
            folders *= len(self.strings)
        named = zip(folders, self.strings, strict=True)
        return [os.path.normpath(os.path.join(folder, os.fsdecode(path))) for folder, path in named]  # noqa: PTH118


def traced(command: Sequence[str], calls: Iterable[str], output: Path) -> Iterator[Call]:
    """Runs a program, then gives these calls of it and of what it started, in the order of their
    ends. Raises RuntimeError if it fails.
    """
    options = ["-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", str(_MAX_BYTES), "-o", str(output)]
    chosen = ["-e", f"trace={','.join([*calls, *QUEUES])}"]
    inject = ["-e", f"inject={','.join(QUEUES)}:error=ENOSYS"]
    program = ["strace", *options, *chosen, *inject, *command]
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    with output.open() as lines:
        yield from _calls_in(lines)


def _calls_in(lines: Iterable[str]) -> Iterator[Call]:
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        thread, text = line.rstrip("\n").split(maxsplit=1)
        begin = number
        if text.endswith("<unfinished ...>"):
            begun[thread] = number, text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<... "):
            begin, head = begun.pop(thread)
            text = head + text.partition(" resumed>")[2]
        match = _CALL.fullmatch(text)
        if match is not None and match[1] not in QUEUES:
            yield Call(begin, number, match[1], match[2].strip(), int(match[3]), match[4])


def _opened_in(text: str) -> list[Opened]:
    return [
        Opened(
            -1 if number == "AT_FDCWD" else int(number),
            None if is_gone else os.fsdecode(_decoded(path)),
        )
        for number, path, is_gone in _OPENED.findall(text)
    ]


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
