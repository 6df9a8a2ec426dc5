"""Time of a training step and peak memory: in memory, offloaded under budgets, and DeepSpeed.

Every system trains the same model on the same batches in a process of its own, one after the other,
for several rounds, so that a noisy neighbour hits all alike. In each round the same run measures
how fast the directories read and write (our engine, plain requests) and how long the step's compute
takes in memory. The headline ratio is the step over the larger of compute and bytes moved /
bandwidth. ``--limit`` holds everything in the run to so many bytes a second of the disk (as root),
which makes a disk that is shared with others a steady one.

python tools/bench_offload.py --nvme DIR [DIR2 ...] [--limit 1GiB] [--width 1024 --depth 36 ...]

Prints a table; with --json writes every sample. Nothing stays in the directories.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed_config import zero3_on_nvme
from disk_bandwidth import Bandwidth, limited, measure_disk
from gpt import GPT
from host_rates import describe_machine, measure_host
from simulator.recording import record
from simulator.trace import Trace

import infinity
from swap.tiers import parse_bytes

BATCH_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process: seconds of each timed step, bytes moved in a step, peak resident bytes.

    ``phase_seconds``: the mean of each part of a step, as the program sees it. ``trace``: what a
    step in memory does, for the simulator.
    """

    system: str
    step_seconds: list[float]
    phase_seconds: dict[str, float]
    trace: dict[str, Any] | None = None
    read_bytes: int = 0
    written_bytes: int = 0
    peak_bytes: int = 0
    overlap_seconds: float = 0.0
    stall_seconds: float = 0.0
    losses: list[float]


@dataclass(slots=True)
class Training:
    """What ``_train`` measured."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison, or with ``--worker`` one system of it."""
    options = _arguments().parse_args(argv)
    if options.worker:
        print(json.dumps(asdict(_WORKERS[options.worker.split(":")[0]](options))))
        return
    result = run(options)
    _print_table(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; samples, and the limits that were measured between them."""
    systems = ["plain", *(f"ours:{budget}" for budget in options.budgets)]
    systems += [f"serial:{options.budgets[0]}"] if options.serial else []
    systems += ["deepspeed"] if options.deepspeed else []
    rounds = []
    limit = parse_bytes(options.limit, name="--limit") if options.limit else None
    with limited(options.nvme, limit):
        for number in range(options.rounds):
            order = systems if number % 2 == 0 else systems[::-1]
            samples = {system: _spawn(options, system) for system in order}
            bandwidth = measure_disk(options.nvme)
            host = measure_host(_dtype(options))
            rounds.append(
                {"bandwidth": asdict(bandwidth), "host": asdict(host), "samples": samples}
            )
    return {
        "machine": describe_machine(),
        "parameters": _num_parameters(options),
        "options": {k: v for k, v in vars(options).items() if k not in ("worker", "json")},
        "rounds": rounds,
    }


def _spawn(options: argparse.Namespace, system: str) -> dict[str, Any]:
    names = ("width", "depth", "vocabulary", "batch", "tokens", "steps", "dtype", "device")
    command = [sys.executable, __file__, "--worker", system, "--nvme", *options.nvme]
    for name in names:
        command += [f"--{name}", str(getattr(options, name))]
    if options.clip:
        command += ["--clip", str(options.clip)]
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent.parent))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = _watch_peak(process)
    output = process.stdout.read() if process.stdout else ""
    if process.wait() != 0:
        raise RuntimeError(f"{system} ended with status {process.returncode}")
    sample: dict[str, Any] = json.loads(output.splitlines()[-1])
    sample["peak_bytes"] = max(peak(), sample["peak_bytes"])
    return sample


def _watch_peak(process: subprocess.Popen[str]) -> Callable[[], int]:
    """Largest resident size of the process tree, which a thread looks at until the end."""
    peak = 0

    def look() -> None:
        nonlocal peak
        root = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                tree = [root, *root.children(recursive=True)]
                peak = max(peak, sum(entry.memory_info().rss for entry in tree))
            except psutil.NoSuchProcess:
                return
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()
    return lambda: peak


# Workers: each trains in this process and returns its sample.


def _plain(options: argparse.Namespace) -> Sample:
    """In memory: weights in the compute dtype, float32 masters, fused AdamW."""
    model = _model(options, "cpu")
    masters = [p.detach().float().to(options.device).requires_grad_() for p in model.parameters()]
    model.to(options.device).to(_dtype(options))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def update() -> None:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        if options.clip:
            torch.nn.utils.clip_grad_norm_(masters, options.clip)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
                master.grad = None

    traces: list[Trace] = []

    def watch(step: int, passes: Callable[[], None]) -> None:
        if step == 1 and options.device == "cpu":
            traces.append(record(model, passes))
        else:
            passes()

    training = _train(options, model, update, around=watch)
    trace = traces[0].as_json() if traces else None
    return Sample(system="plain", peak_bytes=_peak(), trace=trace, **asdict(training))


def _ours(options: argparse.Namespace) -> Sample:
    kind, budget = options.worker.split(":")
    model = _model(options, "meta" if options.init == "meta" else "cpu")
    with infinity.offload(
        model,
        nvme=options.nvme,
        optimizer=infinity.AdamW(lr=1e-4),
        compute_dtype=_dtype(options),
        host_memory=budget,
        device=options.device,
        max_grad_norm=options.clip,
        overlap=kind == "ours",
    ) as offloaded:
        before: list[infinity.Report] = []

        def update() -> None:
            offloaded.step()

        def warm() -> None:
            before.append(offloaded.report())

        training = _train(options, model, update, warm=warm, finish=offloaded.flush)
        after = offloaded.report()
    steps = len(training.step_seconds)
    return Sample(
        system=options.worker,
        **asdict(training),
        read_bytes=(after.read_bytes - before[0].read_bytes) // steps,
        written_bytes=(after.written_bytes - before[0].written_bytes) // steps,
        overlap_seconds=(after.overlap_seconds - before[0].overlap_seconds) / steps,
        stall_seconds=(after.stall_seconds - before[0].stall_seconds) / steps,
        peak_bytes=_peak(),
    )


def _deepspeed(options: argparse.Namespace) -> Sample:
    """ZeRO-3 with parameters and optimizer on NVMe, in the configuration its documentation
    advises.
    """
    with tempfile.TemporaryDirectory(dir=options.nvme[0]) as folder:
        return _deepspeed_in(folder, options)


def _deepspeed_in(folder: str, options: argparse.Namespace) -> Sample:
    import deepspeed

    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
    )
    config = zero3_on_nvme(folder, batch=options.batch, max_grad_norm=options.clip)
    engine, *_ = deepspeed.initialize(model=_model(options, "cpu"), config=config)
    training = _train(options, engine, engine.step, backward=engine.backward)
    return Sample(system="deepspeed", peak_bytes=_peak(), **asdict(training))


_WORKERS = {"plain": _plain, "ours": _ours, "serial": _ours, "deepspeed": _deepspeed}


def _train(
    options: argparse.Namespace,
    model: Callable[..., torch.Tensor],
    update: Callable[[], None],
    *,
    backward: Callable[[torch.Tensor], Any] = lambda loss: loss.backward(),
    warm: Callable[[], None] = lambda: None,
    finish: Callable[[], None] = lambda: None,
    around: Callable[[int, Callable[[], None]], None] = lambda _, passes: passes(),
) -> Training:
    """Three steps to warm up, then the timed ones; the last includes what was still under way.

    ``around(step, passes)`` runs the forward and backward pass of a step.
    """
    generator = torch.Generator().manual_seed(BATCH_SEED)
    training, marks = Training(), [0.0, 0.0, 0.0, 0.0]
    losses: list[torch.Tensor] = []
    for step in range(3 + options.steps):
        if step == 3:
            finish()
            warm()
        shape = (options.batch, options.tokens + 1)
        batch = torch.randint(0, options.vocabulary, shape, generator=generator).to(options.device)

        def passes(batch: torch.Tensor = batch) -> None:
            loss = model(batch[:, :-1], batch[:, 1:])
            marks[1] = time.perf_counter()
            backward(loss)
            losses.append(loss.detach())

        marks[0] = time.perf_counter()
        around(step, passes)
        marks[2] = time.perf_counter()
        update()
        training.losses.append(losses.pop().item())
        if step == 2 + options.steps:
            finish()
        marks[3] = time.perf_counter()
        if step >= 3:
            training.step_seconds.append(marks[3] - marks[0])
            for name, (first, last) in zip(_PHASES, itertools.pairwise(marks), strict=True):
                mean = (last - first) / options.steps
                training.phase_seconds[name] = training.phase_seconds.get(name, 0.0) + mean
    return training


_PHASES = ("forward", "backward", "update")


def _model(options: argparse.Namespace, device: str) -> GPT:
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(
            width=options.width,
            depth=options.depth,
            vocabulary=options.vocabulary,
            tokens=options.tokens,
        )


def _num_parameters(options: argparse.Namespace) -> int:
    return sum(p.numel() for p in _model(options, "meta").parameters())


def _dtype(options: argparse.Namespace) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def _peak() -> int:
    """Peak resident bytes of this process (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def _of_rounds(rounds: Sequence[dict[str, Any]], system: str) -> list[float]:
    """Seconds a step in each round: the mean of one process, because work passes from step to step
    and the last one waits for all of it.
    """
    samples = [entry["samples"][system]["step_seconds"] for entry in rounds]
    return [statistics.mean(seconds) for seconds in samples]


def _print_table(result: dict[str, Any]) -> None:
    rounds = result["rounds"]
    compute = statistics.median(_of_rounds(rounds, "plain"))
    bandwidth = Bandwidth(
        **{
            way: statistics.median(entry["bandwidth"][way] for entry in rounds)
            for way in ("read", "write", "both", "host")
        }
    )
    print(
        f"{result['parameters'] / 1e6:.0f} M parameters, compute {compute:.2f} s a step in memory,"
    )
    print(
        f"disks read {bandwidth.read / 1e9:.2f} GB/s, write {bandwidth.write / 1e9:.2f}, both at "
        f"once {bandwidth.both / 1e9:.2f}"
    )
    header = (
        "system",
        "step s",
        "spread",
        "I/O s",
        "/ limit",
        "read",
        "written",
        "stall s",
        "peak GiB",
    )
    print("{:<16}{:>9}{:>15}{:>8}{:>9}{:>9}{:>9}{:>9}{:>10}".format(*header))
    for system in rounds[0]["samples"]:
        samples = [entry["samples"][system] for entry in rounds]
        steps = _of_rounds(rounds, system)
        transfer = bandwidth.seconds(samples[0]["read_bytes"], samples[0]["written_bytes"])
        limit = max(compute, transfer)
        median = statistics.median(steps)
        print(
            f"{system:<16}{median:>9.2f}{min(steps):>8.2f}-{max(steps):<6.2f}{transfer:>8.2f}"
            f"{median / limit:>9.2f}"
            f"{samples[0]['read_bytes'] / 1e9:>8.2f}G{samples[0]['written_bytes'] / 1e9:>8.2f}G"
            f"{samples[0]['stall_seconds']:>9.2f}"
            f"{max(s['peak_bytes'] for s in samples) / 2**30:>10.2f}"
        )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvme", required=True, nargs="+", help="a directory for each SSD")
    parser.add_argument("--limit", help="bytes a second of the disk, reads and writes each")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="timed steps in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budgets", nargs="+", default=["1GiB", "64GiB"])
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--init", choices=["meta", "cpu"], default="meta")
    parser.add_argument("--serial", action="store_true", help="the first budget, without overlap")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
