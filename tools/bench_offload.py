"""Time of a training step and peak memory: in memory, offloaded under budgets, and DeepSpeed.

Every system trains the same model on the same batches in a process of its own, one after the other,
a block of steps each, for several rounds, so that a noisy neighbour hits all alike. In each round
the same run measures how fast the directories read and write (our engine, plain requests) and how
long the step's compute takes in memory. The headline ratio is the step over the larger of compute
and bytes moved / bandwidth, round by round. ``--limit`` holds everything in the run to so many
bytes a second of the disk (as root), which makes a disk that is shared with others a steady one.

Each block has a fresh process, alone in memory. With ``--together`` the processes live as long as
the run, in memory that must hold them all, and blocks which are compared are seconds apart.

python tools/bench_offload.py --nvme DIR [DIR2 ...] [--limit 1GiB] [--width 1024 --depth 36 ...]

Prints a table; with --json writes every sample. Nothing stays in the directories.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil
import torch
from disk_bandwidth import Bandwidth, limited, measure_disk
from host_rates import describe_machine, measure_host
from offload_systems import Job
from samples import as_text, extremes

from swap.tiers import parse_bytes

_LOOK_SECONDS = 0.25
"""Between two looks at resident memory, which take time from what is measured."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    options = _arguments().parse_args(argv)
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; samples, and the limits that were measured between them."""
    systems = ["plain", *(f"ours:{budget}" for budget in options.budgets)]
    systems += [f"serial:{options.budgets[0]}"] if options.serial else []
    systems += ["deepspeed"] if options.deepspeed else []
    limit = parse_bytes(options.limit, name="--limit") if options.limit else None
    rounds = []
    with limited(options.nvme, limit), ExitStack() as stack:
        turns = [stack.enter_context(Turns(_job(options, system))) for system in systems]
        for number in range(options.rounds):
            samples = {}
            for turn in turns if number % 2 == 0 else turns[::-1]:
                samples[turn.system] = turn.block()
                if not options.together:
                    turn.end()
            rounds.append(
                {
                    "bandwidth": asdict(measure_disk(options.nvme)),
                    "host": asdict(measure_host(getattr(torch, options.dtype))),
                    "samples": samples,
                }
            )
    model = _job(options, "plain").model("meta")
    return {
        "machine": describe_machine(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "rounds": rounds,
    }


def _job(options: argparse.Namespace, system: str) -> Job:
    names = [field.name for field in fields(Job) if field.name != "system"]
    return Job(system=system, **{name: getattr(options, name) for name in names})


class SystemJob(Protocol):
    """A dataclass of JSON values that says what a system is to do."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def system(self) -> str: ...


class Turns:
    """A system whose process is there from its first block until ``end``.

    ``program``, beside this one, is given ``job``, and answers each line with a line of JSON.
    """

    def __init__(self, job: SystemJob, program: str = "offload_systems.py") -> None:
        self.system = job.system
        self._job = job
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._watch: threading.Thread | None = None
        self._peak_bytes = 0

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def block(self) -> dict[str, Any]:
        """Let it train a block of steps. Raises ``RuntimeError`` if the process ends instead."""
        sample = self.ask("a block")
        sample["peak_bytes"] = max(self._peak_bytes, sample["peak_bytes"])
        return sample

    def ask(self, request: str) -> dict[str, Any]:
        """What it answers to a line. Raises ``RuntimeError`` if the process ends instead."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # if it has ended, its output has, too
            print(request, file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("{"):  # DeepSpeed writes other things, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.end()
        raise RuntimeError(f"{self.system} ended before its block did")

    def end(self) -> None:
        """Let the process end. Raises ``RuntimeError`` if it ends with an error."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()
            assert self._watch is not None
            self._watch.join()
            if process.returncode:
                raise RuntimeError(f"{self.system} ended with status {process.returncode}")

    def _start(self) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        process = subprocess.Popen(
            [sys.executable, str(here / self._program), json.dumps(asdict(self._job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONPATH=str(here.parent)),
        )
        self._peak_bytes = 0
        self._watch = threading.Thread(target=self._watch_peak, args=[process], daemon=True)
        self._watch.start()
        return process

    def _watch_peak(self, process: subprocess.Popen[str]) -> None:
        """Note the largest resident size of the process tree until the end."""
        root = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                tree = [root, *root.children(recursive=True)]
                resident = sum(entry.memory_info().rss for entry in tree)
            except psutil.NoSuchProcess:
                return
            self._peak_bytes = max(self._peak_bytes, resident)
            time.sleep(_LOOK_SECONDS)


def _seconds(entry: dict[str, Any], system: str) -> float:
    """Seconds a step in a round: the mean of a block, because work passes from step to step and the
    last one waits for all of it.
    """
    return float(statistics.mean(entry["samples"][system]["step_seconds"]))


def _io_seconds(entry: dict[str, Any], system: str) -> float:
    """Seconds that the bytes of a step take at the bandwidth that the round measured."""
    sample = entry["samples"][system]
    bandwidth = Bandwidth(**entry["bandwidth"])
    return bandwidth.seconds(sample["read_bytes"], sample["written_bytes"])


def _over_limit(entry: dict[str, Any], system: str) -> float:
    """A step as a multiple of the larger of compute and I/O in the same round."""
    limit = max(_seconds(entry, "plain"), _io_seconds(entry, system))
    return _seconds(entry, system) / limit


def _print_table(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    rates = [
        statistics.median(entry["bandwidth"][way] for entry in rounds) / 1e9
        for way in ("read", "write", "both")
    ]
    compute = _median_of(rounds, _seconds, "plain")
    print(
        f"{result['parameters'] / 1e6:.0f} M parameters, compute {compute} s a step in memory; "
        "disks read {:.2f} GB/s, write {:.2f}, both at once {:.2f}".format(*rates)
    )
    print("Medians of rounds (range); I/O and the limit are those of the same round.")
    row = "{:<16}{:>20}{:>20}{:>20}{:>9}{:>9}{:>9}{:>10}"
    names = ("system", "step s", "I/O s", "/ limit", "read", "written", "stall s", "peak GiB")
    print(row.format(*names))
    for system in rounds[0]["samples"]:
        samples = [entry["samples"][system] for entry in rounds]
        print(
            row.format(
                system,
                *(_median_of(rounds, of, system) for of in (_seconds, _io_seconds, _over_limit)),
                f"{samples[0]['read_bytes'] / 1e9:.2f}G",
                f"{samples[0]['written_bytes'] / 1e9:.2f}G",
                f"{statistics.median(s['stall_seconds'] for s in samples):.2f}",
                f"{max(s['peak_bytes'] for s in samples) / 2**30:.2f}",
            )
        )


def _median_of(
    rounds: Sequence[dict[str, Any]], of: Callable[[dict[str, Any], str], float], system: str
) -> str:
    return as_text(extremes([of(entry, system) for entry in rounds]), 2)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvme", required=True, nargs="+", help="a directory for each SSD")
    parser.add_argument("--limit", help="bytes a second of the disk, reads and writes each")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budgets", nargs="+", default=["1GiB", "64GiB"])
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--init", choices=["meta", "cpu"], default="meta")
    parser.add_argument("--serial", action="store_true", help="the first budget, without overlap")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--together", action="store_true", help="keep the processes: see above")
    parser.add_argument("--json")
    return parser


if __name__ == "__main__":
    main()
