"""What moments in 16 and 8 bits do to the loss: the demo's model trained with each, side by side.

Every run has the same weights to begin with, the same batches and the same schedule; runs differ in
``state_dtype`` alone. Several seeds (of weights and batches) show how much of a difference is
chance. The loss compared is the mean over the last tenth of the steps. A further run in float32,
on the same batches from other weights, tells how far apart two equally good runs lie.

python tools/compare_state_dtypes.py --nvme DIR [--steps 300 --seeds 3 --json out.json]

Everything stays in memory; ``--host-memory`` shows that a budget changes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import infinity

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from train_gpt import GPT, Settings, load_text, loss_of_step, schedule

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


def train(settings: Settings, text: torch.Tensor, weights: int, dtype: torch.dtype) -> list[float]:
    """The losses of one run; ``weights`` is the seed of those at the start."""
    torch.manual_seed(weights)
    model = GPT(layers=settings.layers, width=settings.width, sequence=settings.sequence)
    optimizer = infinity.AdamW(lr=settings.learning_rate, state_dtype=dtype)
    losses = []
    with infinity.offload(
        model,
        settings.nvme,
        optimizer=optimizer,
        compute_dtype=torch.bfloat16,
        host_memory=settings.host_memory,
        max_grad_norm=1.0,
    ) as offloaded:
        factor = torch.optim.lr_scheduler.LambdaLR(offloaded.optimizer, schedule(settings))
        name = f"{str(dtype).removeprefix('torch.')}, seed {settings.seed}"
        for step in tqdm(range(settings.steps), desc=name, leave=False, disable=None):
            loss = loss_of_step(model, text, step, settings)
            offloaded.backward(loss)
            offloaded.step()
            factor.step()
            losses.append(loss.item())
    return losses


def last_tenth(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nvme", required=True, action="append")
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = load_text()
    found: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        settings = Settings(
            output="",
            nvme=options.nvme,
            host_memory=options.host_memory,
            device="cpu",
            steps=options.steps,
            layers=options.layers,
            width=options.width,
            batch=options.batch,
            sequence=options.sequence,
            learning_rate=options.learning_rate,
            seed=seed,
        )
        for dtype in STATE_DTYPES:
            losses = train(settings, text, seed, dtype)
            found.setdefault(str(dtype), []).append(last_tenth(losses))
        # The same batches from other weights: a run as good as the first.
        losses = train(settings, text, seed + 1000, torch.float32)
        found.setdefault("torch.float32, other weights", []).append(last_tenth(losses))
    base = found[str(torch.float32)]
    for name, losses in found.items():
        differences = [loss - other for loss, other in zip(losses, base, strict=True)]
        print(
            f"{name:<30} loss {statistics.fmean(losses):.4f}   minus that of float32: "
            f"{statistics.fmean(differences):+.4f} ({min(differences):+.4f} to "
            f"{max(differences):+.4f})"
        )
    if options.json is not None:
        result = {"losses": found, "options": vars(options) | {"json": str(options.json)}}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
