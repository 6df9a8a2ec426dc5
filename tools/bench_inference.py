"""Time and memory of a pass without training: in memory, offloaded, and accelerate's disk offload.

A Llama with random weights in bfloat16 is saved once; each system loads it in a process of its
own, and they take turns, a pass each, so that a noisy neighbour hits all alike. Nobody reads from
the page cache: it is emptied of weights before each pass. In each round the same run measures how
fast the directory reads (our engine, plain requests). The limit of a pass is the larger of its
compute in memory and the bytes that it read at that bandwidth. All have to put out the same bits.

    python tools/bench_inference.py --nvme DIR [--limit 1GiB] [--budgets 400MiB] [--generate 4]

Prints a table; with --json writes every sample. Nothing stays in the directory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from disk_bandwidth import limited, measure_disk
from host_rates import describe_machine
from inference_systems import Job
from samples import as_text, extremes, ratios
from transformers import LlamaConfig, LlamaForCausalLM

from swap.tiers import parse_bytes


class System:
    """A system in its process, which makes a pass when it is asked to."""

    def __init__(self, job: Job) -> None:
        self.name = job.system
        self.passes: list[dict[str, Any]] = []
        here = Path(__file__).parent
        command = [sys.executable, str(here / "inference_systems.py"), json.dumps(asdict(job))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def make_pass(self) -> None:
        """One pass. Raises RuntimeError if the process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("a pass", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries write other things, too
                self.passes.append(json.loads(line))
                return
        raise RuntimeError(f"{self.name} ended before its pass did")

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()

    def values(self, key: str) -> list[float]:
        """Of all passes."""
        return [one[key] for one in self.passes]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and what was measured between them."""
    limit = parse_bytes(options.limit, name="--limit") if options.limit else None
    names = ["plain", *(f"ours:{budget}" for budget in options.budgets), "accelerate"]
    with ExitStack() as stack:
        folder, nbytes = stack.enter_context(saved_model(options))
        stack.enter_context(limited([options.nvme], limit))
        systems = []
        for name in names:
            systems.append(System(_job(options, name, folder)))
            stack.callback(systems[-1].end)
        reads = []
        for number in range(options.rounds):
            for system in systems if number % 2 == 0 else systems[::-1]:
                system.make_pass()
            reads.append(measure_disk([options.nvme]).read)
    sums = {crc for system in systems for crc in system.values("crc")}
    if len(sums) != 1:
        raise RuntimeError(f"the systems put out different bits: {sums}")
    return {
        "machine": describe_machine(),
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "model_bytes": nbytes,
        "read_bandwidth": reads,
        "passes": {system.name: system.passes for system in systems},
    }


@contextmanager
def saved_model(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A folder with the model, and the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        model = LlamaForCausalLM(config).bfloat16()
        model.save_pretrained(folder)
        yield folder, sum(weights.nbytes for weights in model.parameters())


def _job(options: argparse.Namespace, name: str, folder: str) -> Job:
    return Job(
        system=name,
        model=folder,
        nvme=[options.nvme],
        batch=options.batch,
        tokens=options.tokens,
        generate=options.generate,
    )


def _print_table(result: dict[str, Any]) -> None:
    reads = result["read_bandwidth"]
    passes = result["passes"]
    compute = [one["seconds"] for one in passes["plain"]]
    peers = [one["seconds"] for one in passes["accelerate"]]
    print(
        f"{result['model_bytes'] / 1e9:.2f} GB of weights; the disk reads "
        f"{statistics.median(reads) / 1e9:.2f} GB/s. Medians (range); ratios are of one round."
    )
    row = "{:<16}{:>20}{:>9}{:>20}{:>20}{:>11}"
    print(row.format("system", "pass s", "read", "/ limit", "accelerate / it", "peak MiB"))
    for name, made in passes.items():
        seconds = [one["seconds"] for one in made]
        limits = [
            max(at_least, one["read_bytes"] / rate)
            for at_least, one, rate in zip(compute, made, reads, strict=True)
        ]
        print(
            row.format(
                name,
                as_text(extremes(seconds), 3),
                f"{made[0]['read_bytes'] / 1e9:.2f}G",
                "" if name == "accelerate" else as_text(extremes(ratios(seconds, limits)), 2),
                as_text(extremes(ratios(peers, seconds)), 2),
                f"{max(one['peak_bytes'] for one in made) / 2**20:.0f}",
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvme", required=True, help="a directory on the SSD")
    parser.add_argument("--limit", help="bytes a second of the disk, reads and writes each")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--generate", type=int, default=0, help="so many tokens in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", nargs="+", default=["400MiB"])
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
