"""Everything that a GPU is needed for, in one command: its tests, then how fast training is there.

A piece after the other, each in a process of its own that is ended after nine minutes at the
latest, and writes what it found to PIECE.json as it finds it: what was done stays when a run is
cut off. A piece can be run alone. In the end, and after each piece, the rows for docs/BENCHMARKS.md
are written to rows.md, from all the files that are there.

    python tools/bench_gpu.py --nvme DIR [DIR2 ...] [--out build/bench-gpu] [--piece host32k]

What is trained depends on the memory of the card: the largest model, up to 7 G parameters, that
fits it with all of its state and activations. ``--device cpu --scale small`` runs the same programs
on a CPU, which says that they run and nothing else.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_bench import pieces
from gpu_bench.context import Context, Record
from gpu_bench.rows import rows_of
from gpu_bench.saving import save
from gpu_bench.sizes import SCALES
from gpu_bench.tests import tests
from host_rates import describe_machine

LIMIT_SECONDS = 530.0
"""Of a piece. What it has begun by then is lost, what it has written down is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``seconds``: no further round begins later than that after the beginning."""

    run: Callable[[Context, Record], None]
    seconds: float


PIECES = {
    "tests": Piece(run=tests, seconds=300),
    "rates": Piece(run=pieces.rates, seconds=60),
    "host32k": Piece(run=pieces.HOST["host32k"], seconds=200),
    "host16k": Piece(run=pieces.HOST["host16k"], seconds=140),
    "host8k": Piece(run=pieces.HOST["host8k"], seconds=120),
    "nvme": Piece(run=pieces.nvme, seconds=200),
    "large": Piece(run=pieces.large, seconds=120),
    "save": Piece(run=save, seconds=120),
    "deepspeed": Piece(run=pieces.deepspeed, seconds=140),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where a piece failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _arguments().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for folder in options.nvme:
        Path(folder).mkdir(parents=True, exist_ok=True)
    failed = _run_each(options, arguments) if options.piece is None else not _run_piece(options)
    table = rows_of(options.out)
    (options.out / "rows.md").write_text(table)
    if not options.part_of_run:
        print(table, end="")
    return int(failed)


def _run_each(options: argparse.Namespace, arguments: Sequence[str]) -> bool:
    """All pieces, while there is time; whether one failed."""
    for name in PIECES:
        (options.out / f"{name}.json").unlink(missing_ok=True)  # rows are those of one run
    until = time.monotonic() + 60 * options.minutes
    failed = False
    for name, piece in PIECES.items():
        left = until - time.monotonic()
        if left < piece.seconds / 2:
            print(f"{name}: not run, {left:.0f} s are left of {options.minutes} minutes")
            continue
        started = time.monotonic()
        command = [sys.executable, __file__, *arguments, "--piece", name, "--part-of-run"]
        status = _status_within(command, min(LIMIT_SECONDS, left))
        failed = failed or status != 0
        print(f"{name}: {time.monotonic() - started:.0f} s, status {status}", flush=True)
    return failed


def _status_within(command: Sequence[str], seconds: float) -> int:
    """What a command ends with; it and all that it started are killed when it takes longer."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return process.returncode


def _run_piece(options: argparse.Namespace) -> bool:
    """Run a piece here; whether it did all that it was to do."""
    piece = PIECES[options.piece]
    record = Record(options.out / f"{options.piece}.json", options.piece)
    record.note(machine=describe_machine(), device=options.device, scale=options.scale)
    context = Context(
        scale=SCALES[options.scale],
        device=options.device,
        nvme=options.nvme,
        deadline=time.monotonic() + piece.seconds,
        in_process=options.in_process,
    )
    started = time.monotonic()
    try:
        piece.run(context, record)
    except Exception as error:  # whatever it is, the other pieces go on
        traceback.print_exc()
        record.note(error=f"{type(error).__name__}: {error}")
        return False
    record.note(complete=True, seconds=time.monotonic() - started)
    return True


def _arguments() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvme", nargs="+", default=["build/bench"], help="a folder on each SSD")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"))
    parser.add_argument("--piece", choices=[*PIECES], help="only this one")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all pieces together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--scale", choices=[*SCALES], default="full")
    parser.add_argument("--in-process", action="store_true", help="no process for each system")
    parser.add_argument("--part-of-run", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
