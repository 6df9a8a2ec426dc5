"""Interrupts or kills saves at every point of their way, and checks what is left.

  interrupts  SIGINT and SIGTERM, whose handlers raise, at every line of Python that a small save
              runs through: on the main thread at the line itself, on other threads while that line
              waits
  kills       SIGKILL at every system call of a small save (strace is needed)
  guarded     saves with a step of their guard right behind each

After each the old state or the new one loads; the next save works; no descriptor, thread or file is
left. Ends with status 1 and a line for each point that did not hold.

  python tools/sweep_saves.py interrupts --every 1
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from handler_points import runs_handler

import checkpoint

KINDS = ("save", "copy", "waves", "guard")
MIB = 1 << 20
PAGE = 4096
_PATIENCE_SECONDS = 10.0


def aligned(num_bytes: int, offset: int = 0) -> torch.Tensor:
    """Bytes of memory whose address is `offset` behind the beginning of a page."""
    memory = mmap.mmap(-1, num_bytes + PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + num_bytes]


@dataclass(frozen=True)
class Place:
    """Where a save goes: a checkpoint, in the directories of stripes if there are any."""

    path: Path
    stripes: tuple[Path, ...]

    @classmethod
    def make(cls, folder: Path, num_stripes: int) -> Place:
        stripes = tuple(folder / f"ssd{k}" for k in range(num_stripes))
        for stripe in stripes:
            stripe.mkdir(parents=True, exist_ok=True)
        return cls(folder / "step", stripes)

    def left_over(self) -> list[str]:
        """What is there beyond one checkpoint."""
        entries = sorted(entry.name for entry in self.path.iterdir())
        faults = [] if len(entries) == 2 else [f"in the checkpoint: {entries}"]
        for stripe in self.stripes:
            own = sorted(entry.name for entry in stripe.iterdir())
            faults += [] if len(own) == 1 else [f"in {stripe.name}: {own}"]
        return faults


class Case:
    """A kind of save, done again and again with other values."""

    def __init__(self, kind: str, place: Place) -> None:
        self.kind = kind
        self.place = place
        self._large = aligned(2 * MIB).view(torch.int64)
        self._small = [torch.zeros(50, dtype=torch.int64) for _ in range(3)]
        self.guard = torch.optim.SGD([torch.nn.Parameter(self._large.view(torch.float64))])

    def state(self, seed: int) -> dict[str, Any]:
        """Values that tell the seed, one tensor among them written from where it lies."""
        self.guard.step()  # without gradients: it only waits for what an interrupted save reads
        self._large.fill_(seed)
        for tensor in self._small:
            tensor.fill_(seed)
        return {"large": self._large, "small": self._small, "seed": seed}

    def save(self, state: dict[str, Any]) -> None:
        """Saves, and waits until it is durable."""
        stripes = self.place.stripes or None
        if self.kind == "save":
            checkpoint.save(state, self.place.path, stripes)
            return
        checkpoint.save_async(
            state,
            self.place.path,
            stripes,
            guard=self.guard if self.kind == "guard" else None,
            staging_bytes=3 * MIB // 2 if self.kind == "waves" else None,
        ).result()

    def loaded(self) -> int:
        """The seed of what loads. Raises what `load` does, ValueError for a mixture."""
        state = checkpoint.load(self.place.path)
        seed = int(state["seed"])
        if not all(bool((tensor == seed).all()) for tensor in (state["large"], *state["small"])):
            raise ValueError(f"the values of several saves are mixed in that of {seed}")
        return seed


class Terminated(BaseException):
    """What the handler of SIGTERM raises."""


class Interrupter:
    """Raises a signal at one line of the main thread, or while another thread is at one of its."""

    def __init__(self) -> None:
        self._handled = threading.Event()
        self._main = threading.main_thread().ident
        self._lines = 0
        self._target = -1
        self._signal = signal.SIGINT
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def run(self, work: Callable[[], None], target: int, *, on_main: bool, number: int) -> bool:
        """Does the work with a signal at line `target` (-1: none); gives whether it came through.

        Lines are counted on the main thread or on all others; see `lines`.
        """
        self._lines, self._target, self._signal = 0, target, signal.Signals(number)
        self._handled.clear()
        trace = self._trace_main if on_main else self._trace_other
        try:
            if on_main:
                sys.settrace(trace)
            else:
                threading.settrace(trace)
            work()
        except (KeyboardInterrupt, Terminated):
            return True
        finally:
            sys.settrace(None)
            threading.settrace(None)
        return False

    @property
    def lines(self) -> int:
        """Lines that the last work came through."""
        return self._lines

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled.set()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def _trace_main(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code.co_filename != __file__:
            if not runs_handler(frame):
                return self._trace_main
            self._lines += 1
            if self._lines - 1 == self._target:
                signal.raise_signal(self._signal)
        return self._trace_main

    def _trace_other(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code.co_filename != __file__:
            self._lines += 1
            if self._lines - 1 == self._target:
                assert self._main is not None
                signal.pthread_kill(self._main, self._signal)
                self._handled.wait(_PATIENCE_SECONDS)
        return self._trace_other


@dataclass(frozen=True)
class Footing:
    """What this process holds."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Footing:
        return cls(*(len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")))

    def is_beyond(self, other: Footing) -> bool:
        return self.descriptors > other.descriptors or self.threads > other.threads

    def lost(self) -> list[str]:
        """What is held beyond it, after as long as what is about to end may take."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (now := Footing.now()).is_beyond(self) and time.monotonic() < deadline:
            os.sched_yield()
        faults = []
        if now.descriptors > self.descriptors:
            faults.append(f"{now.descriptors - self.descriptors} descriptors")
        if now.threads > self.threads:
            faults.append(f"{now.threads - self.threads} threads")
        return faults


def interrupt_points(
    case: Case, *, on_main: bool, every: int, first: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """Interrupts saves at every so many of their lines; gives each line with what did not hold."""
    interrupter = Interrupter()
    seed = 1

    def save() -> None:
        case.save(case.state(seed))

    save()
    interrupter.run(save, -1, on_main=on_main, number=signal.SIGINT)
    footing = Footing.now()
    target = first
    while True:
        old, seed = seed, seed + 2
        number = (signal.SIGINT, signal.SIGTERM)[target // every % 2]
        work = partial(case.save, case.state(old + 1))  # torch's own lines are not on trial
        came = interrupter.run(work, target, on_main=on_main, number=number)
        if not came and interrupter.lines <= target:
            return
        yield target, _faults(case, old, seed, footing)
        target += every


def _faults(case: Case, old: int, following: int, footing: Footing) -> list[str]:
    try:
        found = case.loaded()
        faults = [] if found in (old, old + 1) else [f"{found} loads, not {old} or {old + 1}"]
        case.save(case.state(following))
        found = case.loaded()
        faults += [] if found == following else [f"after the next save {found} loads"]
        faults += case.place.left_over()
    except Exception as error:
        faults = [f"{type(error).__name__}: {error}"]
    return faults + footing.lost()


KILLED = (
    "openat,mkdir,fallocate,ftruncate,write,pwrite64,pwritev,io_submit,io_uring_enter,fsync,rename,"
    "unlink,rmdir,flock,close,statfs,getdents64,newfstatat,lseek,fstat,mmap,munmap,futex,clone3,read"
)


def kill_points(case: Case, calls: str, every: int) -> Iterator[tuple[str, list[str]]]:
    """Kills saves at every so many of each of their system calls; what did not hold of each."""
    seed = 1
    for call in calls.split(","):
        position = 1
        while True:
            case.save(case.state(seed))
            killed = _killed_save(case, seed + 1, call, position)
            faults = []
            try:
                found = case.loaded()
                faults += [] if found in (seed, seed + 1) else [f"{found} loads, not {seed}"]
                seed += 2
                case.save(case.state(seed))
                faults += [] if case.loaded() == seed else ["the next save does not load"]
                faults += case.place.left_over()
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")
            yield f"{call} {position}", faults
            if not killed:
                break
            position += every


def _killed_save(case: Case, seed: int, call: str, position: int) -> bool:
    """A save in a child that is killed at a system call; whether it got that far."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        try:
            case.save(case.state(seed))
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    inject = f"inject={call}:signal=SIGKILL:when={position}"
    options = ["-f", "--quiet=all", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
    with subprocess.Popen(["strace", *options, "-p", str(child)], stderr=subprocess.DEVNULL):
        _wait_until_traced(child)
        os.write(go[1], b"g")
        _, status = os.waitpid(child, 0)
    for descriptor in (*ready, *go):
        os.close(descriptor)
    return os.WIFSIGNALED(status)


def _wait_until_traced(process: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while "TracerPid:\t0\n" in Path(f"/proc/{process}/status").read_text():
        if time.monotonic() > deadline:
            raise RuntimeError("strace cannot attach to a child here")
        os.sched_yield()


def guarded_saves(place: Place, count: int, *, offset: int) -> Iterator[tuple[int, list[str]]]:
    """Guarded saves with a step right behind each; gives the number of each and what is wrong."""
    weight = torch.nn.Parameter(aligned(8 * MIB, offset).view(torch.float32).zero_())
    weight.grad = torch.full_like(weight, -1.0)
    average = torch.zeros(100)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(count):
        state = {"w": weight, "average": average}
        pending = checkpoint.save_async(state, place.path, place.stripes or None, guard=optimizer)
        average += 1
        optimizer.step()
        pending.result()
        loaded = checkpoint.load(place.path)
        good = bool((loaded["w"] == step).all()) and bool((loaded["average"] == step).all())
        yield step, [] if good else ["other values than those of the call"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("attack", choices=("interrupts", "kills", "guarded"))
    parser.add_argument("--every", type=int, default=1, help="attack every so many points")
    parser.add_argument("--count", type=int, default=1000, help="guarded saves of each layout")
    parser.add_argument("--calls", default=KILLED, help="system calls to kill at")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of saves")
    parser.add_argument("--stripes", default="0,2", help="numbers of stripe directories")
    parser.add_argument("--first", type=int, default=0, help="the line to begin with")
    parser.add_argument("--threads", choices=("main", "other", "both"), default="both")
    parser.add_argument("--folder", type=Path, help="where to save; the quickest is in memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("aio").setLevel(logging.ERROR)  # of memory that is no disk
    numbers = [int(number) for number in arguments.stripes.split(",")]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bad = 0
        for name, points in _attacks(arguments, Path(folder), numbers):
            bad += _report(name, points)
    sys.exit(bad > 0)


def _attacks(
    arguments: argparse.Namespace, folder: Path, numbers: list[int]
) -> Iterator[tuple[str, Iterable[tuple[object, list[str]]]]]:
    for number in numbers:
        if arguments.attack == "guarded":
            for offset in (0, 4):
                place = Place.make(folder / f"{number}-{offset}", number)
                saves = guarded_saves(place, arguments.count, offset=offset)
                yield f"guarded, offset {offset}, {number} stripes", saves
            continue
        for kind in arguments.kinds.split(","):
            case = Case(kind, Place.make(folder / f"{kind}-{number}", number))
            if arguments.attack == "kills":
                kills = kill_points(case, arguments.calls, arguments.every)
                yield f"killed {kind}, {number} stripes", kills
                continue
            for on_main in {"main": [True], "other": [False]}.get(arguments.threads, [True, False]):
                every, first = arguments.every, arguments.first
                points = interrupt_points(case, on_main=on_main, every=every, first=first)
                where = "main" if on_main else "other threads"
                yield f"interrupted {kind}, {number} stripes, {where}", points


def _report(name: str, points: Iterable[tuple[object, list[str]]]) -> int:
    count = bad = 0
    for point, faults in points:
        count += 1
        bad += bool(faults)
        if faults:
            print(f"{name}, {point}: {'; '.join(faults)}", flush=True)
    print(f"{name}: {count} points, {bad} of them bad", flush=True)
    return bad


if __name__ == "__main__":
    main()
