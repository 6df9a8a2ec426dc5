"""Kills a training run that takes a snapshot after every step, again and again, and checks what the
next process restores.

Each round a new process enters its block on the same directories, restores the newest snapshot,
compares every bit of the state with that of an undisturbed run after as many steps, and trains on,
until SIGKILL comes at a random moment: while it enters, restores, steps, or takes a snapshot. No
step whose snapshot had returned may be lost, and in the end only what snapshots need is left on the
disks. With ``--behind`` snapshots are taken with ``block=False``, and one counts when the next one
is on its way. Ends with status 1 at the first round that does not hold.

  python tools/kill_snapshots.py --rounds 30 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))  # the tests have the model

import infinity
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, everything, train
from tests.support.training import least_budget

ROOT = Path(__file__).parents[1]
_SECONDS = 4.0
"""Within which the first kill comes, after a process began to enter its block; then as fits what
those before it got to.
"""
_MANY_STEPS = 6
_SLACK_BYTES = 256 * 1024
"""Of folders, and ends of pages."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a killed process had said: the step that it restored, and of its last snapshot."""

    restored: int | None
    taken: int | None
    wrong: str


def digest(offloaded: infinity.OffloadedModel) -> str:
    """Of all state, bit by bit."""
    found = hashlib.sha256()
    for name, value in sorted(everything(offloaded).items()):
        found.update(name.encode())
        is_tensor = isinstance(value, torch.Tensor)
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if is_tensor else str(value)
        found.update(raw if isinstance(raw, bytes) else raw.encode())
    return found.hexdigest()


@contextmanager
def offloaded_model(folders: Sequence[str], host_memory: int) -> Iterator[infinity.OffloadedModel]:
    """The model of all runs, as it begins."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"optimizer": ADAMW, "compute_dtype": torch.bfloat16}
    with infinity.offload(seeded(Net), folders, host_memory=host_memory, **options) as offloaded:
        torch.manual_seed(1)
        yield offloaded


def run_to_be_killed(
    folders: Sequence[str], host_memory: int, keep: int | None, *, behind: bool
) -> None:
    """Say what was restored and, after each step, which snapshot is known to be durable."""
    print("begun", flush=True)
    with offloaded_model(folders, host_memory) as offloaded:
        names = [one.name for one in offloaded.snapshots()]
        step = offloaded.restore(names[-1]) if names else 0
        print("restored", step, digest(offloaded), flush=True)
        while True:
            train(offloaded, step, step + 1, torch.bfloat16)
            step += 1
            name = "last" if keep is None else f"step-{step}"
            offloaded.snapshot(name, keep, extra=step, block=not behind)
            print("taken", step - behind, flush=True)


def undisturbed(folder: str, host_memory: int, steps: int) -> list[str]:
    """The digest of the state after so many steps, from none on."""
    found = []
    with offloaded_model([folder], host_memory) as offloaded:
        for step in range(steps + 1):
            found.append(digest(offloaded))
            train(offloaded, step, step + 1, torch.bfloat16)
    return found


def one_round(command: Sequence[str], seconds: float) -> Told:
    """Run until ``seconds`` after the block began to be entered, and kill."""
    restored = taken = None
    timer: threading.Timer | None = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            if not line.endswith("\n"):
                break  # it was killed as it said this: a word may be a write of its own
            kind, *rest = line.split()
            if kind == "begun":
                timer = threading.Timer(seconds, child.send_signal, [signal.SIGKILL])
                timer.start()
            elif kind == "restored":
                restored, state = int(rest[0]), rest[1]
                _states[restored] = state
            else:
                taken = int(rest[0])
        said = child.stderr.read()
        code = child.wait()
    if timer is not None:
        timer.cancel()
    wrong = "" if code == -signal.SIGKILL else f"ended by itself with status {code}: {said[-2000:]}"
    return Told(restored, taken, wrong)


_states: dict[int, str] = {}
"""By step: the digest that was restored last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, help="snapshots by step, so many; else one name")
    parser.add_argument("--behind", action="store_true", help="with block=False")
    parser.add_argument("--folder", type=Path, help="where to; else a temporary one")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--host-memory", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        run = partial(run_to_be_killed, arguments.child, arguments.host_memory, arguments.keep)
        run(behind=arguments.behind)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        wrong = kill_again_and_again(Path(folder), arguments)
    if wrong:
        print(wrong)
    sys.exit(wrong != "")


def kill_again_and_again(folder: Path, arguments: argparse.Namespace) -> str:
    """What did not hold, or nothing."""
    folders = [os.fspath(folder / name) for name in ("a", "b", "undisturbed")]
    for name in folders:
        Path(name).mkdir()
    options: dict[str, Any] = {"optimizer": ADAMW, "compute_dtype": torch.bfloat16}
    host_memory = least_budget(Net, folders[2], **options)
    command = [sys.executable, __file__, "--host-memory", str(host_memory)]
    if arguments.keep:
        command += ["--keep", str(arguments.keep)]
    if arguments.behind:
        command += ["--behind"]
    command += ["--child", *folders[:2]]
    rng, last, within = random.Random(arguments.seed), 0, _SECONDS
    expected: list[str] = []
    for number in range(arguments.rounds):
        started = time.monotonic()
        told = one_round(command, rng.uniform(0.0, within))
        if told.wrong:
            return f"round {number}, seed {arguments.seed}: {told.wrong}"
        if told.restored is not None:
            if told.restored < last:
                return f"round {number}: step {told.restored} restored, {last} was safe"
            if told.restored >= len(expected):
                expected = undisturbed(folders[2], host_memory, told.restored + 20)
            if _states[told.restored] != expected[told.restored]:
                return f"round {number}: other bits than after {told.restored} undisturbed steps"
        steps = (told.taken or 0) - (told.restored or 0)
        within *= 1.3 if steps <= 0 else 0.7 if steps > _MANY_STEPS else 1.0
        last = max(last, told.restored or 0, told.taken or 0)
        seconds = time.monotonic() - started
        print(f"round {number}: {told}, {seconds:.1f} s", flush=True)
    with offloaded_model(folders[:2], host_memory) as offloaded:
        for point in offloaded.snapshots()[-1:]:  # what a killed one wrote goes with the next
            offloaded.restore(point.name)
            offloaded.snapshot(point.name)
        needed = sum(one.nbytes for one in offloaded.snapshots())
    kept = sum(path.lstat().st_blocks * 512 for name in folders for path in Path(name).rglob("*"))
    if kept > needed + _SLACK_BYTES:
        return f"{kept} bytes are left, and the snapshots need {needed}"
    print(f"{arguments.rounds} kills, {last} steps, seed {arguments.seed}: nothing lost")
    return ""


if __name__ == "__main__":
    main()
