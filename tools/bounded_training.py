"""Train a GPT inside a memory cgroup: the budget is held by the kernel, not by our own count.

    python tools/bounded_training.py --nvme DIR --limit 2.5GiB --host-memory 1GiB

Starts itself in a cgroup of ``--limit`` bytes (as root), trains ``--steps`` steps of the
model of ``tools/gpt.py`` in bfloat16, and prints as JSON the losses, the seconds of each step, the
cgroup's peak and the library's own report. A process that needed more would have been killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from gpt import GPT

import infinity
from swap.tiers import parse_bytes
from tests.support.cgroup import run_limited


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker in a cgroup and print what came of it."""
    options = _arguments().parse_args(argv)
    if options.worker:
        print(json.dumps(train(options)))
        return 0
    arguments = [*(sys.argv[1:] if argv is None else argv), "--worker"]
    run = run_limited(
        [sys.executable, __file__, *arguments],
        parse_bytes(options.limit, name="--limit"),
        env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        timeout=None,
    )
    if run.returncode != 0:
        print(f"status {run.returncode} at a peak of {run.peak_bytes} bytes", file=sys.stderr)
        print(run.stderr, file=sys.stderr)
        return 1
    result = json.loads(run.stdout.splitlines()[-1])
    print(
        json.dumps(
            {"limit": options.limit, "cgroup_peak_bytes": run.peak_bytes, **result}, indent=1
        )
    )
    return 0


def train(options: argparse.Namespace) -> dict[str, object]:
    """The training itself."""
    with torch.device("meta"):
        model = GPT(
            width=options.width,
            depth=options.depth,
            vocabulary=options.vocabulary,
            tokens=options.tokens,
        )
    generator = torch.Generator().manual_seed(0)
    losses, seconds = [], []
    with infinity.offload(
        model,
        nvme=options.nvme,
        optimizer=infinity.AdamW(lr=1e-4),
        compute_dtype=torch.bfloat16,
        host_memory=options.host_memory,
        max_grad_norm=options.clip,
    ) as offloaded:
        for _ in range(options.steps):
            shape = (options.batch, options.tokens + 1)
            batch = torch.randint(0, options.vocabulary, shape, generator=generator)
            start = time.perf_counter()
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            offloaded.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        offloaded.flush()
        report = offloaded.report().to_json()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "step_seconds": seconds,
        "report": report,
    }


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--limit", default="2.5GiB", help="of the whole process, by the cgroup")
    parser.add_argument("--host-memory", default="1GiB", help="the budget of the library")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
