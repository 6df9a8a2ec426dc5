"""Fails each operation of everything that the library does, one at a time, and looks what holds.

  python tools/fail_nth.py --actions save,load:striped,step --kinds EIO,torn --every 1

An action is taken with its first call of the C library about files failing, then with its second,
and so on until all calls come through; a library in between (a C compiler is needed) makes them
fail. Kinds are errors, transfers that move half of the bytes or none, and disks that fail for good.
After each: the error is named, values are those of before or after, what comes next has the bits of
an undisturbed run, and no descriptor, thread, memory or file is left. A point that takes more than
`--patience` seconds is a hang: where all threads are is printed, and the program ends. Ends with
status 1 and a line for each point that did not hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))  # the tests have the runs

from crashes.scenarios import SCENARIOS as SAVES
from failures.attempts import Attempts, BlockAttempts, LoadAttempts, RunAttempts, SaveAttempts
from failures.interposed import KINDS, Interposer, Kind, interposed, start_again
from failures.snapshots import SNAPSHOT_ACTIONS, SnapshotAttempts

from tests.support.interrupted_runs import ACTIONS as RUN_ACTIONS
from tests.support.interrupted_runs import Blocks, Scenario, running

_APART = ("killed", "ranks", "snapshot", "snapshot-behind")
_SAVES = [f"save:{name}" for name in SAVES if name not in _APART]
_LOADS = [f"load:{name}" for name in ("save", "striped", "stream")]
_RUNS = [
    f"{action}:{activations}-{budget}"
    for activations in ("keep", "nvme")
    for budget in ("least",)
    for action in ("enter", *RUN_ACTIONS, "exit")
]
_WIDTH, _DEPTH = 400, 6
"""Of a model of which most is on NVMe at the least budget."""
_SNAPSHOTS = [f"snapshot:{action}" for action in SNAPSHOT_ACTIONS]
ACTIONS = (*_SAVES, *_LOADS, *_RUNS, *_SNAPSHOTS)


@contextmanager
def attacked(action: str, folder: Path) -> Iterator[Attempts]:
    """What is to fail, in a folder of its own; a new one behind each that did not hold."""
    what, _, where = action.partition(":")
    interposer = Interposer(folder)
    if what in ("save", "load") and where in SAVES:
        kind = SaveAttempts if what == "save" else LoadAttempts
        yield kind(SAVES[where], folder, interposer)
        return
    if what == "snapshot":
        yield SnapshotAttempts(folder, where, interposer)
        return
    activations, _, budget = where.partition("-")
    scenario = Scenario(activations, budget == "least", width=_WIDTH, depth=_DEPTH)
    if what in ("enter", "exit"):
        yield BlockAttempts(Blocks(scenario, folder), what, interposer)
        return
    with running(scenario, folder) as run:
        yield RunAttempts(run, what, interposer)


def sweep(action: str, kind: Kind, *, every: int, first: int, patience: float) -> Iterator[str]:
    """Fails every so many of an action's calls; gives for each what did not hold, or nothing."""
    number, comes_through = first, False
    while not comes_through:
        with tempfile.TemporaryDirectory() as name:
            faulthandler.dump_traceback_later(patience, exit=True)  # has a thread, from now on
            try:
                with attacked(action, Path(name).resolve()) as attempts:
                    faults: list[str] = []
                    while not faults and not comes_through:
                        faulthandler.dump_traceback_later(patience, exit=True)
                        outcome, faults = attempts.attempt(kind, number)
                        comes_through = not outcome.failed
                        where = f"{action}, {kind.name} of call {number}, {outcome.failed}"
                        number += every
                        if faults or not comes_through:
                            yield f"{where}: {'; '.join(faults)}" if faults else ""
            except Exception as error:  # the end of a run that did not hold
                yield f"{action}, {kind.name}, the end: {type(error).__name__}: {error}"
            finally:
                faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--actions", default=",".join(ACTIONS), help="such as save:striped")
    parser.add_argument("--kinds", default=",".join(KINDS), help="how calls fail")
    parser.add_argument("--every", type=int, default=1, help="calls from one point to the next")
    parser.add_argument("--first", type=int, default=0, help="the call to begin with")
    parser.add_argument("--minutes", type=float, default=0.0, help="for all together; 0: no end")
    parser.add_argument("--folder", type=Path, help="where to; the quickest is in memory")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that a point has")
    arguments = parser.parse_args()
    if not interposed():
        start_again()
    tempfile.tempdir = None if arguments.folder is None else os.fspath(arguments.folder)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    cells = [(a, k) for a in arguments.actions.split(",") for k in arguments.kinds.split(",")]
    count = bad = 0
    for action, kind in cells:
        points = wrong = 0
        end = time.monotonic() + 60 * arguments.minutes / len(cells)
        options = {"every": arguments.every, "first": arguments.first}
        for fault in sweep(action, KINDS[kind], patience=arguments.patience, **options):
            points, wrong = points + 1, wrong + bool(fault)
            if fault:
                print(fault, flush=True)
            if arguments.minutes and time.monotonic() > end:
                break
        print(f"{action}, {kind}: {points} failed, {wrong} bad", flush=True)
        count, bad = count + points, bad + wrong
    print(f"{count} operations failed in {len(cells)} cells, {bad} of them bad")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
