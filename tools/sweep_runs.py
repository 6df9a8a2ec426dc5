"""Interrupts a training run at lines of what it does, and checks what is left.

A KeyboardInterrupt is raised where the main thread is about to begin a line of ours, or (`--behind
calls`) behind a call within one, or (`--behind instructions`) wherever Python may run a handler in
the parts that take, publish and give back, while a small model enters its block, goes forward and
backward, spills gradients, steps, saves, loads, takes or drops a snapshot, or leaves. After each:
values are those of before or after, what comes next has the bits of an undisturbed run, and no
memory, file, descriptor or thread is left. Points are `--every` lines apart and go round, so a
prime number meets every line in the end.
Ends with status 1 and a line for each point that did not hold. A point that takes more than
`--patience` seconds is a hang: where all threads are is printed, and the program ends.

  python tools/sweep_runs.py --minutes 15 --every 97
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
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))  # the tests have the runs

from tests.support import interrupted_runs
from tests.support.interrupted_runs import Blocks, How, Run, Scenario, running
from tests.support.interrupts import (
    interrupt,
    interrupt_at_instruction,
    interrupt_behind_call,
)

ACTIONS = ("enter", "exit", *interrupted_runs.ACTIONS, "snapshot", "drop")
HOW: dict[str, How] = {
    "lines": interrupt,
    "calls": interrupt_behind_call,
    "instructions": interrupt_at_instruction,
}
SCENARIOS = tuple(
    Scenario(activations, is_least)
    for activations in ("nvme", "keep", "host")
    for is_least in (True, False)
)


@contextmanager
def _attacked(scenario: Scenario, action: str, folder: Path) -> Iterator[Run | Blocks]:
    """What is interrupted; a new one for each that did not hold."""
    if action in ("enter", "exit"):
        yield Blocks(scenario, folder)
        return
    with running(scenario, folder) as run:
        yield run


def sweep(
    scenario: Scenario,
    action: str,
    *,
    how: How,
    every: int,
    first: int,
    seconds: float,
    patience: float,
) -> tuple[int, int, list[str]]:
    """Points that were interrupted, lines that there are, and what did not hold."""
    wrong: list[str] = []
    visited, total, number = 0, 0, first
    end = time.monotonic() + seconds
    while not visited or (time.monotonic() < end and visited < total):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with _attacked(scenario, action, Path(folder)) as run:
                    total = total or run.interrupted(action, None, how)[0].seen
                    while not visited or (time.monotonic() < end and visited < total):
                        faulthandler.dump_traceback_later(patience, exit=True)
                        lines, complaint = run.interrupted(action, number % total, how)
                        faulthandler.cancel_dump_traceback_later()
                        visited += 1
                        where = f"line {number % total} of {total}, {lines.line or 'none'}"
                        number += every
                        if complaint:
                            wrong.append(f"{scenario}, {action}, {where}: {complaint}")
                            print(wrong[-1], flush=True)
                            break
            except Exception as error:  # the end of a run that did not hold
                wrong.append(f"{scenario}, {action}, the end: {type(error).__name__}: {error}")
                print(wrong[-1], flush=True)
                visited += 1
            finally:
                faulthandler.cancel_dump_traceback_later()
    return visited, total, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="for all cells together")
    parser.add_argument("--every", type=int, default=97, help="lines from one point to the next")
    parser.add_argument("--first", type=int, default=0, help="the line to begin with")
    parser.add_argument("--actions", default=",".join(ACTIONS), help="what is interrupted")
    parser.add_argument("--scenarios", default="", help="such as `nvme, least`; all without")
    parser.add_argument("--behind", choices=tuple(HOW), default="lines")
    parser.add_argument("--folder", type=Path, help="where to; the quickest is in memory")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a point has")
    arguments = parser.parse_args()
    tempfile.tempdir = None if arguments.folder is None else os.fspath(arguments.folder)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    how = HOW[arguments.behind]
    chosen = [s for s in SCENARIOS if arguments.scenarios in ("", str(s))]
    cells = [(s, action) for s in chosen for action in arguments.actions.split(",")]
    run = partial(
        sweep,
        how=how,
        every=arguments.every,
        first=arguments.first,
        patience=arguments.patience,
    )
    count = bad = 0
    for scenario, action in cells:
        visited, total, wrong = run(scenario, action, seconds=60 * arguments.minutes / len(cells))
        print(f"{scenario}, {action}: {visited} of {total} points, {len(wrong)} bad", flush=True)
        count, bad = count + visited, bad + len(wrong)
    print(f"{count} points in {len(cells)} cells, {bad} of them bad")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
