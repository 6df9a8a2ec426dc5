"""Trains a GPT of 100 million parameters in a fraction of the memory of its training state.

The model is plain PyTorch, the text is the source code of Python's own library, tokens are bytes.
One process takes a few steps in plain PyTorch, for comparison; a second one trains from the start,
offloaded, saves a checkpoint halfway and ends; a third resumes from it and writes a sample. What
was measured is left in the output folder: report.txt, sample.txt, demo.png, measurements.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from train_gpt_report import Measurements, draw, mib, process_memory, report_table

if TYPE_CHECKING:
    import infinity

VOCABULARY = 256  # tokens are bytes
HEAD_WIDTH = 64
PLAIN_STEPS = 4
WARM_UP_STEPS = 8
MIN_STEPS, MAX_STEPS = 12, 80
TRAINING_SECONDS = 200
SAMPLE_BYTES = 240
SAMPLE_CONTEXT = 64
TEMPERATURE = 0.7
PROMPT = b"import os\n\n\ndef "


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is made of; every worker process gets the same ones."""

    output: str
    nvme: list[str]
    host_memory: str
    device: str
    steps: int
    layers: int
    width: int
    batch: int
    sequence: int
    learning_rate: float
    seed: int

    @property
    def checkpoint(self) -> Path:
        return Path(self.output) / "checkpoint"


# The model: nothing here knows that its parameters may be elsewhere.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, -1, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def meta_model(settings: Settings) -> GPT:
    """The model with shapes and no values: no memory."""
    with torch.device("meta"):
        return GPT(layers=settings.layers, width=settings.width, sequence=settings.sequence)


# The task: the same batch for the same step, in whichever process.


def load_text() -> torch.Tensor:
    """The sources of Python's standard library as one row of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 100_000:
        raise SystemExit(f"there are no sources of Python's library in {folder} to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def loss_of_step(
    model: nn.Module, text: torch.Tensor, step: int, settings: Settings
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    last = len(text) - settings.sequence - 1
    starts = torch.randint(0, last, (settings.batch,), generator=generator).tolist()
    rows = torch.stack([text[start : start + settings.sequence + 1] for start in starts])
    rows = rows.long().to(settings.device)
    scores = model(rows[:, :-1]).float()
    return F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


def schedule(settings: Settings) -> Callable[[int], float]:
    """The factor of the learning rate: a warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        part = (step - WARM_UP_STEPS) / max(1, settings.steps - WARM_UP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, part)))

    return factor


@torch.no_grad()
def write_sample(model: nn.Module, settings: Settings) -> str:
    """Text that the model goes on with after PROMPT, a byte at a time."""
    generator = torch.Generator().manual_seed(settings.seed)
    text = list(PROMPT)
    # Always the same shape, so that kernels are set up once; what follows a byte does not reach it.
    window = torch.zeros(1, min(SAMPLE_CONTEXT, settings.sequence), dtype=torch.long)
    for _ in tqdm(range(SAMPLE_BYTES), desc="sample", unit="B", leave=False, disable=None):
        context = text[-window.shape[1] :]
        window[0, : len(context)] = torch.tensor(context)
        scores = model(window.to(settings.device))[0, len(context) - 1].float().cpu()
        chances = torch.softmax(scores / TEMPERATURE, 0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode("ascii", errors="replace")


# The worker processes.


class Meter:
    """Takes the measurements of a worker and shows its progress."""

    def __init__(self, name: str, settings: Settings, first_step: int, last_step: int) -> None:
        self.seen = Measurements(first_step=first_step)
        self._last_moved = 0
        self._bar = tqdm(
            total=last_step,
            initial=first_step,
            desc=name,
            unit="step",
            mininterval=0.1 if sys.stderr.isatty() else 20.0,
        )
        self._started = time.perf_counter()

    def step_done(self, loss: float, tiers: dict[str, int], moved: int) -> None:
        """Write down a step: `tiers` and `moved` are bytes in each tier and moved so far."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        self.seen.losses.append(loss)
        self.seen.step_seconds.append(seconds)
        self.seen.clock.append(time.time())
        self.seen.tiers.append(tiers)
        self.seen.rss.append(process_memory("VmRSS"))
        gigabytes = (moved - self._last_moved) / 1e9
        self._last_moved = moved
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {seconds:.2f} s/step, {gigabytes:.2f} GB moved", refresh=False
        )
        self._bar.update()
        if self._bar.n == self._bar.total:
            self._bar.close()

    def finish(self, settings: Settings) -> Measurements:
        """Write down the peaks: call it last."""
        self.seen.peak_rss = process_memory("VmHWM")
        if settings.device == "cuda":
            self.seen.peak_device = torch.cuda.max_memory_allocated()
        return self.seen


def tiers_and_moved(offloaded: infinity.OffloadedModel) -> tuple[dict[str, int], int]:
    """Bytes in each tier now, and bytes moved to and from NVMe so far."""
    report = offloaded.report()
    return dict(report.resident_bytes), report.read_bytes + report.written_bytes


def train_offloaded(settings: Settings, *, resume: bool) -> Measurements:
    """The first half of the steps, and a checkpoint; or the second half from it, and a sample."""
    import infinity

    half = settings.steps // 2
    torch.manual_seed(settings.seed)
    text, model = load_text(), meta_model(settings)
    with infinity.offload(
        model,
        nvme=settings.nvme,
        optimizer=infinity.AdamW(lr=settings.learning_rate, betas=(0.9, 0.95)),
        device=settings.device,
        compute_dtype=torch.bfloat16,
        host_memory=settings.host_memory,
        max_grad_norm=1.0,
    ) as offloaded:
        scheduler = torch.optim.lr_scheduler.LambdaLR(offloaded.optimizer, schedule(settings))
        first, last = (half, settings.steps) if resume else (0, half)
        if resume:
            scheduler.load_state_dict(offloaded.load(settings.checkpoint)["scheduler"])
        meter = Meter("second half" if resume else "first half", settings, first, last)
        for step in range(first, last):
            loss = loss_of_step(model, text, step, settings)
            loss.backward()
            offloaded.step()
            scheduler.step()
            meter.step_done(loss.item(), *tiers_and_moved(offloaded))
        meter.seen.report = offloaded.report().to_json()
        if resume:
            meter.seen.sample = write_sample(model, settings)
        else:
            offloaded.save(settings.checkpoint, extra={"scheduler": scheduler.state_dict()})
        meter.seen.peak_held = offloaded.report().peak_host_bytes
        meter.seen.num_parameters = sum(p.numel() for p in model.parameters())
        return meter.finish(settings)


def train_plain(settings: Settings) -> Measurements:
    """The same first steps with everything in memory: bf16 weights, fp32 masters and moments."""
    torch.manual_seed(settings.seed)
    text, model = load_text(), meta_model(settings)
    model = model.to_empty(device=settings.device)
    for module in model.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    masters = [p.detach().clone() for p in model.parameters()]
    model = model.bfloat16()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(settings))
    meter = Meter("plain PyTorch", settings, 0, settings.steps)
    for step in range(settings.steps):
        loss = loss_of_step(model, text, step, settings)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        scheduler.step()
        meter.step_done(loss.item(), {}, 0)
    return meter.finish(settings)


def run_worker(name: str, settings: Settings, results: Path) -> None:
    """The whole life of a worker process: what it saw is written to `results` as JSON."""
    start_rss = process_memory("VmRSS")
    plain = name == "plain"
    seen = train_plain(settings) if plain else train_offloaded(settings, resume=name == "second")
    seen.start_rss = start_rss
    results.write_text(json.dumps(asdict(seen)))


def start_worker(name: str, settings: Settings) -> Measurements:
    """Run a worker in an operating-system process of its own and wait for it."""
    results = Path(settings.output) / f"{name}.json"
    arguments = ["worker", name, json.dumps(asdict(settings)), str(results)]
    done = subprocess.run([sys.executable, str(Path(__file__).resolve()), *arguments], check=False)
    if done.returncode:
        raise SystemExit(f"the process {name!r} ended with status {done.returncode}")
    seen = Measurements(**json.loads(results.read_text()))
    results.unlink()
    return seen


# The driver.


def affordable_steps(plain: Measurements) -> int:
    """How many steps to take on this machine; room is left for offloading to cost something."""
    seconds = 1.25 * median(plain.step_seconds[1:])
    return max(MIN_STEPS, min(MAX_STEPS, int(TRAINING_SECONDS / seconds)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", default="demo-output", help="folder for the results (default: %(default)s)")
    add("--nvme", action="append", help="swap directory, one for each SSD (default: in --output)")
    add("--host-memory", default="256MiB", help="the budget (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, help=f"in all (default: what takes about {TRAINING_SECONDS} s)")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=1024, help=f"a multiple of {HEAD_WIDTH}")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--sequence", type=int, default=128, help="bytes of text in each")
    add("--learning-rate", type=float, default=3e-4)
    add("--seed", type=int, default=1)
    add("--keep-checkpoint", action="store_true", help="leave the checkpoint in the folder")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 4:
        parser.error(f"--steps {arguments.steps} is too few; give 4 or more")
    if arguments.width % HEAD_WIDTH:
        parser.error(f"--width {arguments.width} is not a multiple of {HEAD_WIDTH}")
    return arguments


def show_plan(settings: Settings, console: Console) -> None:
    """Where every byte will live; SystemExit if the budget cannot work."""
    import infinity

    plan = infinity.plan(
        meta_model(settings), host_memory=settings.host_memory, compute_dtype=torch.bfloat16
    )
    if not plan.fits:
        least = mib(plan.least_host_bytes)
        raise SystemExit(f"--host-memory {settings.host_memory} is too small; the least is {least}")
    console.print(Panel(Text(str(plan)), title="the plan"))


def main() -> None:
    arguments = parse_arguments()
    keep_checkpoint = vars(arguments).pop("keep_checkpoint")
    output = Path(arguments.output)
    swap = output / "swap"
    arguments.nvme = arguments.nvme or [str(swap)]
    wanted_steps, arguments.steps = arguments.steps, PLAIN_STEPS
    settings = Settings(**vars(arguments))
    console = Console()
    show_plan(settings, console)
    output.mkdir(parents=True, exist_ok=True)
    if settings.nvme == [str(swap)]:
        swap.mkdir(exist_ok=True)
    try:
        plain = start_worker("plain", settings)
        settings = replace(settings, steps=wanted_steps or affordable_steps(plain))
        runs = [start_worker("first", settings), start_worker("second", settings)]
    finally:
        shutil.rmtree(swap, ignore_errors=True)
        if not keep_checkpoint:
            shutil.rmtree(settings.checkpoint, ignore_errors=True)
    everything = {"settings": asdict(settings), "runs": [asdict(run) for run in (*runs, plain)]}
    (output / "measurements.json").write_text(json.dumps(everything))
    (output / "sample.txt").write_text(runs[1].sample)
    draw(output / "demo.png", runs, plain)
    table = report_table(runs, plain)
    with (output / "report.txt").open("w") as file:
        Console(file=file, width=88).print(table)
    console.print(table)
    console.print(Panel(Text(runs[1].sample), title="what it writes now"))
    console.print(f"report.txt, sample.txt, demo.png and measurements.json are in {output}/")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        _, _, worker, described, into = sys.argv
        run_worker(worker, Settings(**json.loads(described)), Path(into))
    else:
        main()
