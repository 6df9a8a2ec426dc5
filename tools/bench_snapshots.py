"""What safety adds to a step: a restore point at each step, and ``verify_swap``.

One process trains a GPT of which all state is in host memory, or all that may be is on NVMe. Groups
of steps of each mode take turns, so that a noisy neighbour hits all alike:

  plain      steps alone
  snapshot   ``offloaded.snapshot("last")`` after each step, in the same block
  background the same with ``block=False``: written behind the next step
  verified   steps alone, in another block of the same model, with ``verify_swap=True``; NVMe only

A group ends with ``offloaded.flush()``, so that every update is counted where it belongs. One of
snapshots in the background begins with one that is on its way, and ends without waiting for its
last: so many are written within its time as steps are taken. ``bytes`` are those that the snapshots
of a group wrote, for each of them, which is what was in host memory.

    python tools/bench_snapshots.py --dir DIR [--dir DIR2 ...] [--home host nvme] [--json out.json]

Prints a table; with --json every sample. Nothing stays in the directories.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from samples import as_text, cpu_name, quartiles, ratios

import infinity

MODES = {
    "host": ("plain", "snapshot", "background"),
    "nvme": ("plain", "snapshot", "background", "verified"),
}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
WARM_UP_STEPS = 3
NAME = "last"


class Training:
    """A model in its block, and steps of it."""

    def __init__(
        self, stack: ExitStack, options: argparse.Namespace, home: str, folders: Sequence[str]
    ) -> None:
        self._options = options
        shape = (options.batch, options.tokens)
        generator = torch.Generator().manual_seed(0)
        self._batches = [
            torch.randint(options.vocabulary, shape, generator=generator)
            for _ in range(options.accumulate)
        ]
        is_nvme = home != "host"
        verify = home == "verified"
        self.model = make_model(options)
        self.offloaded = stack.enter_context(
            infinity.offload(
                self.model,
                nvme=list(folders),
                optimizer=infinity.AdamW(lr=1e-4),
                compute_dtype=DTYPES[options.dtype],
                host_memory=least_bytes(options, verify=verify) if is_nvme else "4GiB",
                verify_swap=verify,
            )
        )
        self.run(WARM_UP_STEPS)

    def run(self, steps: int, mode: str = "plain") -> tuple[float, int]:
        """(seconds, bytes that snapshots wrote) of each of so many steps."""
        written, pending = 0, None
        if mode == "background":
            pending = self.offloaded.snapshot(NAME, block=False)
        started = time.perf_counter()
        for _ in range(steps):
            for tokens in self._batches:
                self.model(tokens, tokens.roll(-1, dims=1)).backward()
            self.offloaded.step()
            if mode == "snapshot":
                written += self.offloaded.snapshot(NAME).written_bytes
            elif mode == "background":
                pending = self.offloaded.snapshot(NAME, block=False)
        self.offloaded.flush()
        seconds = time.perf_counter() - started
        if pending is not None:
            written = steps * pending.result().written_bytes
        return seconds / steps, written // steps


def make_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(
        width=options.width,
        depth=options.depth,
        vocabulary=options.vocabulary,
        tokens=options.tokens,
    )


def least_bytes(options: argparse.Namespace, *, verify: bool) -> int:
    """The least budget, with which all that may be is on NVMe."""
    return infinity.plan(
        make_model(options),
        host_memory=1,
        compute_dtype=DTYPES[options.dtype],
        verify_swap=verify,
    ).least_host_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    options = _arguments().parse_args(argv)
    torch.set_num_threads(options.threads)
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of each home, and what they come to."""
    rounds = {home: rounds_of(options, home) for home in options.home}
    return {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "parameters": sum(p.numel() for p in make_model(options).parameters()),
        "rounds": rounds,
        "summary": {home: summary(found) for home, found in rounds.items()},
    }


def rounds_of(options: argparse.Namespace, home: str) -> list[dict[str, tuple[float, int]]]:
    """By mode, (seconds, bytes) of each step of a group."""
    found = []
    with folders_in(options.dir) as folders, ExitStack() as stack:
        plain = Training(stack, options, home, folders["plain"])
        others = {"plain": plain, "snapshot": plain, "background": plain}
        if "verified" in MODES[home]:
            others["verified"] = Training(stack, options, "verified", folders["verified"])
        for number in range(options.rounds):
            modes = MODES[home] if number % 2 == 0 else MODES[home][::-1]
            found.append({mode: others[mode].run(options.steps, mode) for mode in modes})
        plain.offloaded.drop_snapshot(NAME)
    return found


def summary(rounds: Sequence[dict[str, tuple[float, int]]]) -> dict[str, Any]:
    """Of each mode, (median, lower quartile, upper quartile); ratios are taken within a round."""
    plain = [one["plain"][0] for one in rounds]
    rows: dict[str, Any] = {}
    for mode in rounds[0]:
        seconds = [one[mode][0] for one in rounds]
        rows[mode] = {"step": quartiles(seconds)}
        if mode != "plain":
            added = [s - p for s, p in zip(seconds, plain, strict=True)]
            rows[mode] |= {"over plain": quartiles(ratios(seconds, plain))}
            rows[mode] |= {"added": quartiles(added)}
        if mode in ("snapshot", "background"):
            rows[mode]["bytes"] = statistics.median(one[mode][1] for one in rounds)
    return rows


@contextmanager
def folders_in(directories: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """For each block, folders that are gone afterwards."""
    with ExitStack() as stack:
        holders = [
            stack.enter_context(tempfile.TemporaryDirectory(prefix=".bench-snapshots-", dir=d))
            for d in directories
        ]
        found: dict[str, list[str]] = {}
        for block in ("plain", "verified"):
            made = [Path(holder, block) for holder in holders]
            for folder in made:
                folder.mkdir()
            found[block] = [str(folder) for folder in made]
        yield found


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, {12 * result['parameters'] / 1e6:.0f} MB "
        "of state; medians (quartiles), seconds of a step"
    )
    for home, rows in result["summary"].items():
        for mode, row in rows.items():
            text = f"{home:5} {mode:10} step {as_text(row['step'], 3)}"
            if "over plain" in row:
                text += f"  over plain {as_text(row['over plain'], 3)}"
                text += f"  added {as_text(row['added'], 3)}"
            if "bytes" in row:
                text += f"  written for each {row['bytes'] / 1e6:.1f} MB"
            print(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", action="append", required=True, help="a directory, once per SSD")
    parser.add_argument("--home", nargs="+", choices=[*MODES], default=[*MODES])
    parser.add_argument("--dtype", choices=[*DTYPES], default="float32", help="of weights")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--steps", type=int, default=3, help="of a group")
    parser.add_argument("--rounds", type=int, default=6, help="groups of each mode")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write every sample there")
    return parser


if __name__ == "__main__":
    main()
