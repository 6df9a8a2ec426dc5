"""Training steps of a Llama of 6.7 G parameters in simulated time, by the library's own planners,
caches and pipelines.

    simulate_steps.py [--tokens 8192 32768] [--state host nvme half] [--json FILE]

Nothing is computed and nothing is moved: a device, a link, disks and processors take as long as
their rates say. What is left is the schedule: which transfer and which update begins when, and what
waits for what. Time that Python takes is not in it. A row is the mean of steps in which the order
of uses is known, beside what computing, the update and the disks take alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from simulation.model import Llama
from simulation.running import LEARNING, Machine, Outcome, simulate

from swap.tiers import Budget, format_bytes, parse_bytes

HOST_MEMORY = {"host": "200GiB", "half": "56GiB", "nvme": "24GiB"}
"""In which all state lies, with spare blocks; half of it; the gradients, and little more."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON where that is asked for."""
    options = _arguments().parse_args(argv)
    machine = Machine(
        flops=options.flops,
        link=options.link,
        adam=options.adam,
        disk_read=options.disk_read,
        disk_write=options.disk_write,
        memory=options.memory,
    )
    rows = []
    for state in options.state:
        budget = Budget(
            host_bytes=parse_bytes(HOST_MEMORY[state], name="host_memory"),
            device_bytes=parse_bytes(options.device_memory, name="device_memory"),
        )
        for tokens in options.tokens:
            steps = LEARNING + options.steps
            outcome = simulate(Llama(), machine, budget, tokens=tokens, steps=steps)
            rows.append((state, tokens, outcome))
    Console(width=None if Console().is_terminal else 160).print(_table(rows))
    if options.json:
        told = [{"state": state, "tokens": n} | asdict(outcome) for state, n, outcome in rows]
        Path(options.json).write_text(json.dumps({"machine": asdict(machine), "rows": told}))


def _table(rows: Sequence[tuple[str, int, Outcome]]) -> Table:
    table = Table(
        "state in", "tokens", "step, s", "computing", "update", "disks", "over the larger"
    )
    table.add_column("of the update seen")
    table.add_column("read + written")
    for state, tokens, outcome in rows:
        numbers = (outcome.step, outcome.compute, outcome.update, outcome.disk)
        table.add_row(
            state,
            f"{tokens:,}",
            *(f"{number:.3f}" for number in numbers),
            f"{outcome.over_the_larger:.3f}",
            f"{outcome.seen_of_update:.1%}" if not outcome.disk else "",
            f"{format_bytes(int(outcome.read))} + {format_bytes(int(outcome.written))}",
        )
    return table


def _arguments() -> argparse.ArgumentParser:
    parser: Any = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--state", nargs="+", choices=HOST_MEMORY, default=[*HOST_MEMORY])
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--device-memory", default="24GiB", help="for weights, and state")
    parser.add_argument("--json", help="also write all numbers here")
    rates = Machine()
    for name, help_ in (
        ("flops", "operations of the device"),
        ("link", "bytes each way between host and device"),
        ("memory", "bytes that the device reads and writes in its memory"),
        ("adam", "parameters that the processors update"),
        ("disk-read", "bytes"),
        ("disk-write", "bytes"),
    ):
        default = getattr(rates, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{help_}, a second")
    made: argparse.ArgumentParser = parser
    return made


if __name__ == "__main__":
    main()
