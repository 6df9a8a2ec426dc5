"""Time the Adam kernel beside torch's fused AdamW and, where it is installed, DeepSpeed's CPU Adam.

All rows run in one process, in turn, and every round starts with another row; a ratio is taken
within a round, so that what slows a whole round cancels out. Rows share their arrays, which are by
default larger than any cache.

Every row is timed as a training step needs it: from gradients in the dtype that backward leaves to
weights in the dtype that forward reads. Bytes are what a step must at least read and write, without
the reads that a cache does of its own before it writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from samples import cpu_name, quartiles, ratios, seconds_of

from swap.adam import MOMENT_BLOCK, AdamHyper, AdamTensors, Origin
from swap.kernels import adam_step, adam_step_of, copy_values, split_master
from swap.processors import isa

HYPER = AdamHyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)
PAUSE_SECONDS = 0.02
"""Before each timing: OpenMP threads keep spinning for a while after a parallel region of torch."""
ELEMENTS = 60 << 20
"""No power of two: arrays 2**27 + 2**12 bytes apart, as the allocator lays two of 2**27 bytes, get
the same tags from the way predictors of some first-level caches and lose a fifth of their speed."""


@dataclass
class Row:
    """One way to take a step, with what it keeps; ``peers`` names the rows it is compared with."""

    name: str
    keeps: str
    bytes_per_parameter: int
    step: Callable[[], object]
    peers: tuple[str, ...] = ()
    seconds: list[float] = field(default_factory=list)


class Arrays:
    """The arrays of one parameter of ``n`` elements in every dtype that a row wants."""

    def __init__(self, n: int) -> None:
        self.master = torch.randn(n)
        self.exp_avg = torch.randn(n) * 0.01
        self.exp_avg_sq = torch.rand(n) * 0.01
        self.grad = torch.randn(n)
        self.hi = torch.empty(n, dtype=torch.bfloat16)
        self.lo = torch.empty(n, dtype=torch.int16)
        split_master(self.master, self.hi, self.lo)
        self.grad_bf16 = self.grad.bfloat16()
        self.weight_bf16 = self.master.bfloat16()
        self.grad_fp16 = self.grad.half()
        self.weight_fp16 = self.master.half()


def ours(arrays: Arrays, threads: int) -> Iterator[Row]:
    step = partial(
        adam_step,
        exp_avg=arrays.exp_avg,
        exp_avg_sq=arrays.exp_avg_sq,
        hyper=HYPER,
        threads=threads,
    )
    yield Row(
        "ours fp32",
        "fp32 weights and state",
        28,
        partial(step, weight=arrays.master, rest=None, grad=arrays.grad),
        ("torch fp32", "deepspeed fp32"),
    )
    of_bf16 = ("torch fp32, bf16 in and out", "deepspeed fp32, bf16 in and out", "torch all bf16")
    yield Row(
        "ours halves",
        "bf16 weights, 16 more bits of master, fp32 state",
        26,
        partial(step, weight=arrays.hi, rest=arrays.lo, grad=arrays.grad_bf16),
        of_bf16,
    )
    yield Row(
        "ours bf16 copy",
        "bf16 weights, fp32 master and state",
        28,
        partial(step, weight=arrays.weight_bf16, rest=arrays.master, grad=arrays.grad_bf16),
        of_bf16,
    )
    yield Row(
        "ours fp16 copy",
        "fp16 weights, fp32 master and state",
        28,
        partial(step, weight=arrays.weight_fp16, rest=arrays.master, grad=arrays.grad_fp16),
        ("torch fp32, fp16 in and out",),
    )
    yield from ours_aside(arrays, threads)
    yield from ours_in_fewer_bits(arrays, threads)


def ours_aside(arrays: Arrays, threads: int) -> Iterator[Row]:
    """From values that stay where they are, as updates in spare blocks are made."""
    keeps = "bf16 weights, 16 more bits of master, fp32 state"
    old = AdamTensors(
        weight=arrays.hi,
        rest=arrays.lo,
        exp_avg=arrays.exp_avg,
        exp_avg_sq=arrays.exp_avg_sq,
        grad=arrays.grad_bf16,
    )
    state = (old.weight, arrays.lo, old.exp_avg, old.exp_avg_sq)
    # Written before anything is timed: memory is mapped when it is first.
    weight, rest, exp_avg, exp_avg_sq = copies = [torch.zeros_like(array) for array in state]
    new = replace(old, weight=weight, rest=rest, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    def copy_then_step() -> None:
        for source, target in zip(state, copies, strict=True):
            copy_values(source, target)
        adam_step_of(new, HYPER, origin=None, threads=threads)

    aside = partial(adam_step_of, new, HYPER, origin=None, old=old, threads=threads)
    yield Row("ours halves, aside", keeps, 26, aside, ("ours halves",))
    yield Row("ours halves, copied before", keeps, 26 + 24, copy_then_step, ("ours halves",))


def ours_in_fewer_bits(arrays: Arrays, threads: int) -> Iterator[Row]:
    """Halves of bf16, with moments that are rounded by random bits."""
    n = arrays.master.numel()
    step = partial(
        adam_step,
        weight=arrays.hi,
        rest=arrays.lo,
        grad=arrays.grad_bf16,
        hyper=HYPER,
        origin=Origin(parameter=0),
        threads=threads,
    )
    yield Row(
        "ours halves, bf16 moments",
        "bf16 weights, 16 more bits of master, bf16 state",
        18,
        partial(step, exp_avg=arrays.exp_avg.bfloat16(), exp_avg_sq=arrays.exp_avg_sq.bfloat16()),
        ("ours halves",),
    )
    yield Row(
        "ours halves, 8-bit moments",
        "bf16 weights, 16 more bits of master, 8-bit state",
        14,
        partial(
            step,
            exp_avg=torch.zeros(n, dtype=torch.uint8),
            exp_avg_sq=torch.zeros(n, dtype=torch.uint8),
            exp_avg_scale=torch.zeros(-(-n // MOMENT_BLOCK)),
            exp_avg_sq_scale=torch.zeros(-(-n // MOMENT_BLOCK)),
        ),
        ("ours halves",),
    )


def _between(
    step: Callable[[], object],
    arrays: Arrays,
    grad: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """An fp32 step for a model of another dtype: gradients converted, weights copied out."""
    arrays.grad.copy_(grad)
    step()
    weight.copy_(arrays.master)


def in_and_out(name: str, step: Callable[[], object], arrays: Arrays) -> Iterator[Row]:
    """The rows of an optimizer that steps over the fp32 arrays."""
    yield Row(f"{name} fp32", "fp32 weights and state", 28, step)
    for dtype, grad, weight in (
        ("bf16", arrays.grad_bf16, arrays.weight_bf16),
        ("fp16", arrays.grad_fp16, arrays.weight_fp16),
    ):
        yield Row(
            f"{name} fp32, {dtype} in and out",
            f"{dtype} weights, fp32 master and state",
            28 + 6 + 6,
            partial(_between, step, arrays, grad, weight),
        )


def _fused(
    weight: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> Callable[[], object]:
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=HYPER.lr, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(HYPER.step)),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    return optimizer.step


def of_torch(arrays: Arrays) -> Iterator[Row]:
    step = _fused(arrays.master, arrays.grad, arrays.exp_avg, arrays.exp_avg_sq)
    yield from in_and_out("torch", step, arrays)
    yield Row(
        "torch all bf16",
        "bf16 weights and state, no master: other results",
        14,
        _fused(
            arrays.weight_bf16,
            arrays.grad_bf16,
            arrays.exp_avg.bfloat16(),
            arrays.exp_avg_sq.bfloat16(),
        ),
    )


def of_deepspeed(arrays: Arrays) -> Iterator[Row]:
    """The same rows for DeepSpeed, where it can be imported; it compiles at its first use."""
    parameter = torch.nn.Parameter(arrays.master)
    parameter.grad = arrays.grad
    with contextlib.redirect_stdout(sys.stderr):  # its log would stand before our JSON
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
        except ImportError:
            return
        optimizer = DeepSpeedCPUAdam([parameter], lr=HYPER.lr, adamw_mode=True)
    optimizer.state[parameter] = {
        "step": HYPER.step,
        "exp_avg": arrays.exp_avg,
        "exp_avg_sq": arrays.exp_avg_sq,
    }
    yield from in_and_out("deepspeed", optimizer.step, arrays)


def measure(rows: list[Row], rounds: int, pause_seconds: float) -> None:
    """Fill in the seconds of every row, one entry a round, after one round that does not count."""
    for count in range(rounds + 1):
        start = count % len(rows)
        for row in rows[start:] + rows[:start]:
            time.sleep(pause_seconds)
            seconds = seconds_of(row.step)
            if count:
                row.seconds.append(seconds)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles, by name."""
    return dict(zip(("median", "q1", "q3"), quartiles(values), strict=True))


def summarise(rows: list[Row], n: int) -> list[dict[str, Any]]:
    by_name = {row.name: row for row in rows}
    summaries: list[dict[str, Any]] = []
    for row in rows:
        seconds = spread(row.seconds)
        per_second = n / seconds["median"]
        speedups = {
            peer: spread(ratios(by_name[peer].seconds, row.seconds))
            for peer in row.peers
            if peer in by_name
        }
        summaries.append(
            {
                "name": row.name,
                "keeps": row.keeps,
                "seconds": seconds,
                "parameters_per_second": per_second,
                "bytes_per_parameter": row.bytes_per_parameter,
                "bytes_per_second": per_second * row.bytes_per_parameter,
                "speedup_over": speedups,
            }
        )
    return summaries


def print_table(report: dict[str, Any]) -> None:
    print(
        f"{report['cpu']}, {report['threads']} threads, {report['isa']}, torch {report['torch']};"
        f" {report['elements']} parameters, median of {report['rounds']} rounds (quartiles)\n"
    )
    print(f"{'row':32} {'ms a step':>24} {'G params/s':>11} {'B/param':>8} {'GB/s':>6}  keeps")
    for row in report["rows"]:
        ms = {name: 1e3 * value for name, value in row["seconds"].items()}
        print(
            f"{row['name']:32} {ms['median']:9.2f} ({ms['q1']:.2f}-{ms['q3']:.2f})".ljust(57)
            + f" {row['parameters_per_second'] / 1e9:11.3f} {row['bytes_per_parameter']:8}"
            f" {row['bytes_per_second'] / 1e9:6.1f}  {row['keeps']}"
        )
    print()
    for row in report["rows"]:
        for peer, ratio in row["speedup_over"].items():
            print(
                f"{row['name']:14} is {ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})"
                f" x as fast as {peer}"
            )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"parameters ({ELEMENTS})")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each row (15)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="for every row (all CPUs that the process may use)",
    )
    parser.add_argument("--no-deepspeed", action="store_true", help="leave DeepSpeed out")
    parser.add_argument("--quick", action="store_true", help="a small run that shows it works")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    n, rounds, pause = options.elements, options.rounds, PAUSE_SECONDS
    if options.quick:
        n, rounds, pause = min(n, 1 << 16), min(rounds, 2), 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        arrays = Arrays(n)
        rows = [*ours(arrays, options.threads), *of_torch(arrays)]
        if not options.no_deepspeed:
            rows += of_deepspeed(arrays)
        measure(rows, rounds, pause)
    finally:
        torch.set_num_threads(before)
    report = {
        "cpu": cpu_name(),
        "threads": options.threads,
        "isa": isa(),
        "torch": torch.__version__,
        "elements": n,
        "rounds": rounds,
        "rows": summarise(rows, n),
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)


if __name__ == "__main__":
    main()
