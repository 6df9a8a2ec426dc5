"""What a checkpoint at every step costs the training loop: with a guard, with a copy, without any.

One process trains a GPT with fused AdamW in memory. In each round every mode trains a few steps,
the modes in turns, so that a noisy neighbour hits all alike:

  none    no checkpoint
  guard   ``Manager.save_async(step, state, guard=optimizer)`` after each step: bytes are read from
          the live tensors while the next forward and backward run (as in FastPersist, pipelining)
  copy    ``Manager.save_async(step, state)``: copied first, written behind

A save is under way during every step that counts. ``--accumulate`` makes a step of several batches,
as large runs do; how long the save takes beside forward and backward is printed, because a save
that does not fit cannot be hidden.

    python tools/bench_overlap.py --dir DIR [--dir DIR2 ...] [--rounds 7] [--json out.json]

Prints a table; with --json every sample. Nothing stays in the directories.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpt import GPT

import checkpoint

MODES = ("none", "guard", "copy")


@dataclass(slots=True, kw_only=True)
class Samples:
    """Seconds in one mode: of the steps (checkpoint calls included), of forward and backward, of
    the calls alone, and until their bytes were durable.
    """

    step: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)


class Training:
    """A model, its optimizer, and one step of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = GPT(
            width=options.width,
            depth=options.depth,
            vocabulary=options.vocabulary,
            tokens=options.tokens,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (options.batch, options.tokens)
        count = options.accumulate
        self._batches = [torch.randint(options.vocabulary, shape) for _ in range(count)]

    def compute(self) -> None:
        """Forward and backward of every batch of a step."""
        self.optimizer.zero_grad(set_to_none=False)
        for tokens in self._batches:
            self.model(tokens, tokens.roll(-1, dims=1)).backward()

    def state(self) -> dict[str, Any]:
        """What a run resumes from."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    options = _arguments().parse_args(argv)
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    training = Training(options)
    training.compute()
    training.optimizer.step()
    rounds: list[dict[str, Any]] = []
    with _managers(options.dir) as managers:
        for number in range(options.rounds + 1):
            order = MODES if number % 2 == 0 else MODES[::-1]
            samples = {
                mode: asdict(measure(training, managers[mode], mode, options.steps))
                for mode in order
            }
            rounds.append({"samples": samples, "memory copy": copy_seconds(training.state())})
    rounds = rounds[1:]  # the first one touches memory for the first time
    return {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "torch": torch.__version__,
        "state bytes": sum(tensor.nbytes for tensor in tensors_of(training.state())),
        "rounds": rounds,
        "summary": summary(rounds),
    }


def measure(training: Training, manager: checkpoint.Manager, mode: str, steps: int) -> Samples:
    """``steps`` steps after one that does not count, each with the save of the last under way."""
    samples = Samples()
    pending: checkpoint.PendingSave | None = None
    for step in range(steps + 1):
        started = time.perf_counter()
        training.compute()
        computed = time.perf_counter()
        training.optimizer.step()
        stepped = time.perf_counter()
        if pending is not None:
            samples.durable.append(pending.result().seconds)
        waited = time.perf_counter() - stepped
        called = time.perf_counter()
        if mode != "none":
            guard = training.optimizer if mode == "guard" else None
            pending = manager.save_async(step, training.state(), guard)
        ended = time.perf_counter()
        if step:
            samples.step.append(ended - started)
            samples.compute.append(computed - started)
            samples.returned.append(ended - called + waited)
    if pending is not None:
        pending.result()
    return samples


def copy_seconds(state: dict[str, Any]) -> dict[str, float]:
    """Of a copy of the state in memory: into memory that has been used, and into new memory."""
    source = list(tensors_of(state))
    target = [tensor.clone() for tensor in source]

    def again() -> None:
        for there, here in zip(target, source, strict=True):
            there.copy_(here)

    return {
        "used": _seconds(again),
        "new": _seconds(lambda: [tensor.clone() for tensor in source]),
    }


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nesting of dicts and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from tensors_of(value)


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each mode, [median, lowest, highest] over the rounds; ratios are taken within a round."""
    return {mode: _row(rounds, mode) for mode in MODES}


def _row(rounds: Sequence[dict[str, Any]], mode: str) -> dict[str, list[float]]:
    def each(key: str, of: str = mode) -> list[float]:
        return [statistics.median(entry["samples"][of][key]) for entry in rounds]

    row = {
        "step": each("step"),
        "step over none": _ratios(each("step"), each("step", "none")),
        "forward and backward over none": _ratios(each("compute"), each("compute", "none")),
    }
    if mode != "none":
        row["returned"] = each("returned")
        row["durable"] = each("durable")
        row["durable over forward and backward"] = _ratios(each("durable"), each("compute"))
    if mode == "copy":
        for memory in ("used", "new"):
            copies = [entry["memory copy"][memory] for entry in rounds]
            row[f"returned over a copy into {memory} memory"] = _ratios(each("returned"), copies)
    return {name: [statistics.median(v), min(v), max(v)] for name, v in row.items()}


def _ratios(values: list[float], others: list[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _managers(directories: Sequence[str]) -> Iterator[dict[str, checkpoint.Manager]]:
    """One per mode, in folders that are gone afterwards. Each keeps one checkpoint."""
    holders = [tempfile.TemporaryDirectory(prefix=".bench-overlap-", dir=d) for d in directories]
    try:
        folders = [Path(holder.name) for holder in holders]
        yield {
            mode: checkpoint.Manager(folders[0] / mode, stripe_dirs=folders, keep=1)
            for mode in MODES
        }
    finally:
        for holder in holders:
            holder.cleanup()


def _print_table(result: dict[str, Any]) -> None:
    print(f"state {result['state bytes'] / 1e6:.0f} MB; median (lowest to highest) of rounds")
    for mode, row in result["summary"].items():
        for name, (middle, low, high) in row.items():
            print(f"{mode:6} {name:42} {middle:8.4f} ({low:.4f} to {high:.4f})")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", action="append", required=True, help="a directory, once per SSD")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--steps", type=int, default=3, help="that count, in each mode of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write every sample there")
    return parser


if __name__ == "__main__":
    main()
