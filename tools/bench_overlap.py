"""What a checkpoint at every step costs the training loop: with a guard and with a copy.

One process trains a GPT with fused AdamW in memory. Steps without a checkpoint take turns with
steps that have one, so that a noisy neighbour hits all alike:

  none    no checkpoint
  guard   ``Manager.save_async(step, state, guard=optimizer)``: bytes are read from the live tensors
          while forward and backward run (as in FastPersist, pipelining)
  copy    ``Manager.save_async(step, state)``: copied first, written behind

A step that saves begins with the call and ends when its update is done and its checkpoint durable,
as it would with one at every step. ``--accumulate`` makes a step of several batches, as large runs
do; how long the save takes beside forward and backward is printed, because a save that does not
fit cannot be hidden. Then guarded saves with nothing beside them: how long they keep the cores of
the whole machine busy, which computing on all of them has to do without.

    python tools/bench_overlap.py --dir DIR [--dir DIR2 ...] [--cycles 20] [--json out.json]

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from gpt import GPT
from samples import quartiles, ratios, seconds_of

import checkpoint

CYCLE = ("none", "guard", "none", "copy")
WARM_UP_CYCLES = 2
SAVES_ALONE = 12
SETTLING_SECONDS = 0.3
"""What a save leaves to the kernel is done by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of one step: all of it, forward and backward, the call to save, and from that call
    until the checkpoint was durable.
    """

    mode: str
    all: float
    compute: float
    returned: float = 0.0
    durable: float = 0.0


class Training:
    """A model, its optimizer, and one step of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = GPT(
            width=options.width,
            depth=options.depth,
            vocabulary=options.vocabulary,
            tokens=options.tokens,
        ).to(options.device)
        self.device = options.device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (options.batch, options.tokens)
        count = options.accumulate
        batches = [torch.randint(options.vocabulary, shape) for _ in range(count)]
        self._batches = [batch.to(options.device) for batch in batches]

    def compute(self) -> None:
        """Forward and backward of every batch of a step."""
        self.optimizer.zero_grad(set_to_none=False)
        for tokens in self._batches:
            self.model(tokens, tokens.roll(-1, dims=1)).backward()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()

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
    """All cycles; a copy of the state in memory is timed in each of them too."""
    training = Training(options)
    training.compute()
    training.optimizer.step()
    cycles: list[dict[str, Any]] = []
    with _managers(options.dir) as managers:
        for number in range(WARM_UP_CYCLES + options.cycles):
            order = CYCLE if number % 2 == 0 else CYCLE[::-1]
            steps = [take_step(training, managers.get(mode), mode, number) for mode in order]
            copies = copy_seconds(training.state(), training.synchronize)
            cycles.append({"steps": [asdict(step) for step in steps], "memory copy": copies})
        alone = [
            core_seconds_of_save(training, managers["guard"], number)
            for number in range(len(cycles), len(cycles) + SAVES_ALONE)
        ][WARM_UP_CYCLES:]
    cycles = cycles[WARM_UP_CYCLES:]
    return {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "torch": torch.__version__,
        "state bytes": sum(tensor.nbytes for tensor in tensors_of(training.state())),
        "cycles": cycles,
        "alone": alone,
        "summary": summary(cycles) | {"alone": _columns(alone)},
    }


def take_step(
    training: Training, manager: checkpoint.Manager | None, mode: str, number: int
) -> Step:
    """One step; with a manager, beside a save of the state it began with."""
    state = training.state()
    pending: checkpoint.PendingSave | None = None
    started = time.perf_counter()
    if manager is not None:
        guard = training.optimizer if mode == "guard" else None
        pending = manager.save_async(number, state, guard)
    returned = time.perf_counter()
    training.compute()
    computed = time.perf_counter()
    training.optimizer.step()
    training.synchronize()
    durable = pending.result().seconds if pending is not None else 0.0
    return Step(
        mode=mode,
        all=time.perf_counter() - started,
        compute=computed - returned,
        returned=returned - started,
        durable=durable,
    )


def core_seconds_of_save(
    training: Training, manager: checkpoint.Manager, number: int
) -> dict[str, float]:
    """Seconds of all cores while nothing but a guarded save happens, and of this process."""
    machine, process = _busy_seconds(), time.process_time()
    manager.save_async(number, training.state(), training.optimizer).result()
    time.sleep(SETTLING_SECONDS)
    found = {"cores busy": _busy_seconds() - machine, "process": time.process_time() - process}
    training.optimizer.step()
    return found


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0)  # guests count as users


def copy_seconds(state: dict[str, Any], wait: Callable[[], None]) -> dict[str, float]:
    """Of a copy of the state in memory: into memory that has been used, and into new memory.
    ``wait`` waits until a device has made it.
    """
    source = list(tensors_of(state))
    target = [tensor.clone() for tensor in source]

    def again() -> None:
        for there, here in zip(target, source, strict=True):
            there.copy_(here)
        wait()

    def anew() -> None:
        copies = [tensor.clone() for tensor in source]
        wait()
        del copies

    return {"used": seconds_of(again), "new": seconds_of(anew)}


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


def summary(cycles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each mode, (median, lower quartile, upper quartile) over the cycles; ratios are taken
    within a cycle, to the mean of its steps without a checkpoint.
    """
    return {mode: _row(cycles, mode) for mode in ("none", "guard", "copy")}


def _row(cycles: Sequence[dict[str, Any]], mode: str) -> dict[str, tuple[float, ...]]:
    def each(key: str, of: str = mode) -> list[float]:
        return [
            statistics.mean(step[key] for step in cycle["steps"] if step["mode"] == of)
            for cycle in cycles
        ]

    row = {"step": each("all"), "forward and backward": each("compute")}
    if mode != "none":
        row["step over none"] = ratios(each("all"), each("all", "none"))
        row["returned"] = each("returned")
        row["durable"] = each("durable")
        row["durable over forward and backward"] = ratios(each("durable"), each("compute"))
    if mode == "copy":
        for memory in ("used", "new"):
            copies = [cycle["memory copy"][memory] for cycle in cycles]
            row[f"returned over a copy into {memory} memory"] = ratios(each("returned"), copies)
    return {name: quartiles(values) for name, values in row.items()}


def _columns(rows: Sequence[dict[str, float]]) -> dict[str, tuple[float, ...]]:
    return {name: quartiles([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def _managers(directories: Sequence[str]) -> Iterator[dict[str, checkpoint.Manager]]:
    """One per mode that saves, in folders that are gone afterwards. Each keeps one checkpoint."""
    holders = [tempfile.TemporaryDirectory(prefix=".bench-overlap-", dir=d) for d in directories]
    try:
        folders = [Path(holder.name) for holder in holders]
        yield {
            mode: checkpoint.Manager(folders[0] / mode, stripe_dirs=folders, keep=1)
            for mode in ("guard", "copy")
        }
    finally:
        for holder in holders:
            holder.cleanup()


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"state {result['state bytes'] / 1e6:.0f} MB; medians (quartiles) of the cycles, in seconds"
    )
    for mode, row in result["summary"].items():
        for name, (middle, low, high) in row.items():
            print(f"{mode:6} {name:42} {middle:8.4f} ({low:.4f} to {high:.4f})")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", action="append", required=True, help="a directory, once per SSD")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--cycles", type=int, default=20, help="of four steps each")
    parser.add_argument("--json", help="write every sample there")
    return parser


if __name__ == "__main__":
    main()
