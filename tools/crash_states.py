"""Cuts the power of saves at every moment, and looks at what is left.

  python tools/crash_states.py --scenario all --seed 0 --states 2000

Each scenario is recorded once, by its system calls (strace is needed). From what POSIX promises of
these, states are made that the disk may be in after a power cut: every prefix, every effect alone
and every one missing, all subsets where they are few, torn writes, and then a sample that the seed
decides. Each that differs from those before is put into a folder and tried: the newest checkpoint
that was reported loads, or one that was begun since, bit for bit, and the next save works and
leaves nothing over. Prints counts and what did not hold; ends with status 1 if anything did not.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from crashes.scenarios import SCENARIOS, RankSaves
from crashes.trials import Counts, try_out
from local_ranks import Job, be_rank

_SHOWN = 5


def rank(job: Job) -> None:
    """One rank of a scenario of several."""
    scenario = SCENARIOS[job.arguments["scenario"]]
    assert isinstance(scenario, RankSaves)
    scenario.run_rank(Path(job.arguments["top"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scenario", default="all", help=f"all, or of {', '.join(SCENARIOS)}")
    parser.add_argument("--seed", type=int, default=0, help="for what is sampled")
    parser.add_argument("--states", type=int, default=2000, help="to enumerate of each scenario")
    parser.add_argument("--folder", type=Path, help="where to; the quickest is in memory")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # DCP's, of a single process
    names = list(SCENARIOS) if arguments.scenario == "all" else arguments.scenario.split(",")
    if arguments.record is not None:
        SCENARIOS[names[0]].run(arguments.record)
        return
    total = Counts()
    for name in names:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            top = Path(folder).resolve() / "top"
            counts = try_out(SCENARIOS[name], top, count=arguments.states, seed=arguments.seed)
        _print(name, counts)
        total.effects += counts.effects
        total.syncs += counts.syncs
        total.states += counts.states
        total.different += counts.different
        total.faults += counts.faults
    _print("all", total)
    sys.exit(bool(total.faults))


def _print(name: str, counts: Counts) -> None:
    print(
        f"{name}: {counts.effects} effects, {counts.syncs} syncs, {counts.states} states, "
        f"{counts.different} of them different and tried, {len(counts.faults)} bad",
        flush=True,
    )
    if name != "all":
        for fault in counts.faults[:_SHOWN]:
            print(f"  {fault}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2], rank)
    main()
