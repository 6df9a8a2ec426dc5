"""Trains a small GPT over several ranks, its parameters partitioned between them, and resumes.

    torchrun --nproc-per-node 2 examples/torchrun.py --nvme /mnt/nvme0 --checkpoints /mnt/shared/run

On several machines, the same on each of them (here 2 machines with 4 ranks each):

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        --max-restarts 3 examples/torchrun.py --nvme /local/nvme --checkpoints /shared/run

`--nvme` is local to each machine, `--checkpoints` is where all machines see it. A rank that is
killed ends the others; torchrun starts them all again, and they go on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import checkpoint
import infinity

VOCABULARY, LENGTH, BATCH = 256, 64, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(x)
        return result


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def loss_of(model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    """The loss of this rank's part of the global batch of a step."""
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(step * ranks + dist.get_rank())
    starts = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    rows = ((starts + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    scores = model(rows[:, :-1]).float()
    return F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)  # every rank has to make the same model
    model = GPT(options.width, options.layers)
    manager = checkpoint.Manager(
        options.checkpoints, keep=options.keep, coordinator=checkpoint.GroupCoordinator()
    )
    newest = manager.latest() or 0
    pending = None
    with infinity.offload(
        model,
        options.nvme,
        device=device,
        optimizer=infinity.AdamW(lr=1e-3),
        compute_dtype=torch.bfloat16,
        host_memory=options.host_memory,
        max_grad_norm=1.0,
        process_group=dist.group.WORLD,
    ) as offloaded:
        if newest:
            offloaded.load(manager.path(newest))
            if dist.get_rank() == 0:
                print(f"goes on from step {newest}", flush=True)
        for step in range(newest, options.steps):
            loss = loss_of(model, step, device)
            offloaded.backward(loss)
            offloaded.step()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
            if (step + 1) % options.save_every == 0:
                if pending is not None:
                    pending.result()
                    manager.retire()
                pending = offloaded.save(manager.path(step + 1), block=False)
        if pending is not None:
            pending.result()
            manager.retire()


def join(backend: str) -> None:
    """Make the process group. Ranks that torchrun starts again find the addresses of those before
    in its store; so each start has a part of the store for itself.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    start = f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    own = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=own, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on a local SSD")
    parser.add_argument("--checkpoints", type=Path, required=True, help="seen by all machines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep", type=int, default=3, help="so many checkpoints")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--host-memory", default="1GiB", help="of each rank")
    options = parser.parse_args()
    use_gpu = torch.cuda.is_available()
    join("nccl" if use_gpu else "gloo")
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
