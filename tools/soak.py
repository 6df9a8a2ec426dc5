"""Trains small random models offloaded through faults, kills and resumes, and compares every bit
with an undisturbed run in memory.

  python tools/soak.py --minutes 60 --seed 1

A program is a task (a model of mixed layers, an optimizer, a dtype, clipping, accumulation, passes
that raise, rows that are changed) and its lives: processes that train it in blocks of random
budgets and modes on one directory or two, save it and take snapshots, have calls of the C library
fail, leave, raise, or are killed at a random call; the next goes on from the newest that is
durable. Each loss, weights at random moments and after each resume, and all values at the end have
to have the bits of the undisturbed run; what was durable may not get lost; and no descriptor,
thread, memory or file may be left. Ends with status 1 at the first program that does not hold, and
the command that repeats it. Ctrl-C ends it with the counts so far. (Threads take turns as they
like: some faults meet another call then.)
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))  # the tests have parts of this

from failures.interposed import interposed, start_again
from soaking.judging import Counts
from soaking.running import Program


def soak(seed: int, numbers: range, minutes: float, folder: Path | None) -> int:
    """Runs programs until the time is over; gives the exit status."""
    counts, end = Counts(), time.monotonic() + 60 * minutes
    status = 0
    for number in numbers:
        if minutes and time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory(dir=folder, prefix="soak-") as name:
            program = Program(seed, number, Path(name).resolve(), counts)
            try:
                wrong = program.run()
            except KeyboardInterrupt:
                break
        if wrong:
            again = f"python tools/soak.py --seed {seed} --first {number} --programs 1"
            print(*wrong, f"{program.task}", f"seed {seed}: repeat it by  {again}", sep="\n")
            status = 1
            break
    print(f"seed {seed}: {counts}; {'0 bad' if not status else '1 bad'}", flush=True)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="0: as many as --programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the program to begin with")
    parser.add_argument("--programs", type=int, default=1_000_000, help="at most")
    parser.add_argument("--folder", type=Path, help="where to; else a temporary one")
    arguments = parser.parse_args()
    if not interposed():
        start_again()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()  # modules are there to stay, and lives collect often
    numbers = range(arguments.first, arguments.first + arguments.programs)
    sys.exit(soak(arguments.seed, numbers, arguments.minutes, arguments.folder))


if __name__ == "__main__":
    main()
