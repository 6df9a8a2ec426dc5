"""Peak memory and seconds of a step over the length of sequences, by what becomes of activations.

Each mode trains the same GPT in bfloat16, offloaded within one budget, in a process of its own:

  keep       what backward needs stays in memory
  recompute  the inputs of layers stay, the rest is computed again (`torch.utils.checkpoint`)
  host       `activations="host"`: on a CPU that is the program's memory, and so the same as keep
  nvme       `activations="nvme"`: all but the latest goes to the SSD and comes back
  both       recompute, and the inputs of layers go to the SSD

The processes take turns, a step each, so that a noisy neighbour hits all alike; the first step of
each length is not counted. All modes have to give the same losses, bit for bit. Memory is what was
resident at most in a step; what the model needs is that of a step of 64 tokens.

    python tools/bench_sequences.py --nvme DIR [--limit 1GiB] [--tokens 2048 4096 8192]

Prints a table; with --json every sample. Nothing stays in the directory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
from disk_bandwidth import limited, measure_disk
from gpt import GPT
from host_rates import describe_machine
from offload_systems import peak_bytes
from samples import as_text, extremes, ratios
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from swap.tiers import parse_bytes

MODES = ("keep", "recompute", "host", "nvme", "both")
SHORT_TOKENS = 64
WARM_STEPS = 3
"""Of short sequences: the first ones make a plan and fill the budget."""


class Recomputed(nn.Module):
    """A layer that keeps its input alone, and computes the rest again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


class System:
    """A mode in its process, which takes a step of so many tokens when it is asked to."""

    def __init__(self, mode: str, options: argparse.Namespace) -> None:
        self.mode = mode
        command = [sys.executable, __file__, "--worker", json.dumps(vars(options) | {"mode": mode})]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, tokens: int) -> dict[str, Any]:
        """Raises RuntimeError if the process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(tokens, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.mode} ended with status {self._process.wait()}")
        made: dict[str, Any] = json.loads(answer)
        return made

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of each length: a step of each mode."""
    limit = parse_bytes(options.limit, name="--limit") if options.limit else None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.nvme))
        stack.enter_context(limited([options.nvme], limit))
        given = argparse.Namespace(**vars(options) | {"nvme": folder})
        systems = []
        for mode in options.modes:
            systems.append(System(mode, given))
            stack.callback(systems[-1].end)
        alone = {system.mode: system.step(SHORT_TOKENS)["peak_bytes"] for system in systems}
        rounds = {tokens: rounds_of(systems, tokens, options.rounds) for tokens in options.tokens}
        disk = measure_disk([folder])
    return {
        "machine": describe_machine(),
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "disk": {"read": disk.read, "write": disk.write},
        "model_peak_bytes": alone,
        "rounds": rounds,
    }


def rounds_of(systems: Sequence[System], tokens: int, count: int) -> list[dict[str, Any]]:
    """Of each round a step of each mode; raises RuntimeError where the losses differ."""
    rounds = []
    for number in range(count + 1):
        order = systems if number % 2 == 0 else systems[::-1]
        made = {system.mode: system.step(tokens) for system in order}
        losses = {one["loss"] for one in made.values()}
        if len(losses) != 1:
            raise RuntimeError(f"the modes gave different losses: {losses}")
        rounds.append(made)
    return rounds[1:]


def work(options: argparse.Namespace) -> None:
    """Take a step for every line of the input."""
    torch.manual_seed(0)
    model = GPT(
        width=options.width,
        depth=options.depth,
        vocabulary=options.vocabulary,
        tokens=max(options.tokens),
    )
    if options.mode in ("recompute", "both"):
        model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
    with infinity.offload(
        model,
        options.nvme,
        optimizer=infinity.AdamW(lr=1e-4),
        compute_dtype=torch.bfloat16,
        host_memory=options.budget,
        activations=_activations(options.mode),
    ) as offloaded:
        take = _stepping(options, model, offloaded)
        for _ in range(WARM_STEPS):
            take(SHORT_TOKENS)
        for line in sys.stdin:
            print(json.dumps(take(int(line))), flush=True)


def _activations(mode: str) -> Literal["keep", "host", "nvme"]:
    ways = {"recompute": "keep", "both": "nvme"}
    return cast("Literal['keep', 'host', 'nvme']", ways.get(mode, mode))


def _stepping(
    options: argparse.Namespace, model: nn.Module, offloaded: infinity.OffloadedModel
) -> Callable[[int], dict[str, Any]]:
    """Takes a step of so many tokens, from idle to idle."""
    generator = torch.Generator().manual_seed(1)

    def take(tokens: int) -> dict[str, Any]:
        rows = torch.randint(0, options.vocabulary, (1, tokens + 1), generator=generator)
        before = offloaded.report()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this step
        started = time.perf_counter()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        offloaded.step()
        offloaded.flush()
        seconds = time.perf_counter() - started
        after = offloaded.report()
        return {
            "seconds": seconds,
            "loss": loss.item(),
            "peak_bytes": peak_bytes(),
            "read_bytes": after.read_bytes - before.read_bytes,
            "written_bytes": after.written_bytes - before.written_bytes,
        }

    return take


def _print_table(result: dict[str, Any]) -> None:
    disk = result["disk"]
    print(
        f"The disk reads {disk['read'] / 1e9:.2f} GB/s and writes {disk['write'] / 1e9:.2f}. "
        "Medians (range); ratios are of one round; memory is the most of all rounds."
    )
    row = "{:<8}{:<11}{:>22}{:>20}{:>18}{:>10}{:>8}{:>14}{:>8}"
    names = ("tokens", "mode", "s a step", "/ recompute", "read + written")
    print(row.format(*names, "peak MiB", "cut", "beyond model", "cut"))
    for tokens, rounds in result["rounds"].items():
        peaks = {mode: max(one[mode]["peak_bytes"] for one in rounds) for mode in rounds[0]}
        more = {mode: peak - result["model_peak_bytes"][mode] for mode, peak in peaks.items()}
        again = [one["recompute"]["seconds"] for one in rounds if "recompute" in one]
        for mode in rounds[0]:
            made = [one[mode] for one in rounds]
            seconds = [one["seconds"] for one in made]
            moved = [
                statistics.median(one[key] for one in made) / 1e9
                for key in ("read_bytes", "written_bytes")
            ]
            print(
                row.format(
                    tokens,
                    mode,
                    as_text(extremes(seconds), 2),
                    as_text(extremes(ratios(seconds, again)), 2) if again else "",
                    f"{moved[0]:.2f} + {moved[1]:.2f} GB",
                    f"{peaks[mode] / 2**20:.0f}",
                    _cut(peaks, mode),
                    f"{more[mode] / 2**20:.0f}",
                    _cut(more, mode),
                )
            )


def _cut(peaks: dict[str, int], mode: str) -> str:
    """Against keeping, in per cent."""
    return f"{100 * (1 - peaks[mode] / peaks['keep']):.0f} %" if "keep" in peaks else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nvme", help="a directory on the SSD")
    parser.add_argument("--limit", help="bytes a second of the disk, reads and writes each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--budget", default="192MiB", help="host_memory")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write every sample there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(argparse.Namespace(**json.loads(options.worker)))
        return
    if not options.nvme:
        parser.error("--nvme is needed")
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
