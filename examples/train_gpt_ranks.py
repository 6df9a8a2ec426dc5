"""Trains the GPT of train_gpt.py over several ranks, and shows what each of them keeps and writes.

    torchrun --nproc-per-node 4 examples/train_gpt_ranks.py --nvme DIR --output out/four

A step takes `--batches` batches (default: one for each rank), shared out evenly. One process takes
them one after the other and accumulates, which is the same training:

    torchrun --nproc-per-node 1 examples/train_gpt_ranks.py --nvme DIR --output out/one \
        --batches 4 --compare out/four

`--compare` says how far losses, gradient norms and the state in the end are from those of another
run with the same options. Two ranks have its bits, and any number of ranks in float32
(`--dtype float32`) that takes one batch each, because sums are taken in the same order; a
bfloat16 gradient accumulated over more than two batches by one process is rounded more often than
over ranks. Computing on one thread each (`--threads 1`, the default) keeps matrix products alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrun import join
from train_gpt import Settings, load_text, loss_of_step, meta_model

import checkpoint
import infinity

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STATE_BYTES = 12
"""Of a trained parameter, in either dtype: weights, the rest of the master, two moments."""


def train(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Every step, and a checkpoint; what this rank saw of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = options.batches // ranks
    torch.manual_seed(settings.seed)
    text, model = load_text(), meta_model(settings)
    losses, norms = [], []
    with infinity.offload(
        model,
        nvme=settings.nvme,
        optimizer=infinity.AdamW(lr=settings.learning_rate, betas=(0.9, 0.95)),
        device=settings.device,
        compute_dtype=DTYPES[options.dtype],
        host_memory=settings.host_memory,
        max_grad_norm=1.0,
        process_group=dist.group.WORLD,
    ) as offloaded:
        for step in range(settings.steps):
            for batch in range(rank * share, (rank + 1) * share):
                loss = loss_of_step(model, text, step * options.batches + batch, settings)
                offloaded.backward(loss / share)
                losses.append(loss.item())
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        offloaded.save(settings.checkpoint)
        report = offloaded.report().to_json()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
    planned = report["planned_bytes"]
    return {
        "losses": losses,
        "norms": norms,
        "parameters": num_parameters,
        "state bytes": planned["state in host"] + planned["state on nvme"],
        "peak host bytes": report["peak_host_bytes"],
        "bytes moved": report["read_bytes"] + report["written_bytes"],
    }


def of_all_ranks(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of every rank, by rank: JSON values."""
    coordinator = checkpoint.GroupCoordinator()
    return coordinator.exchange(value)


def checkpoint_bytes(path: Path, ranks: int) -> list[int]:
    """Bytes of the data files that each rank wrote."""
    found = [0] * ranks
    for file in json.loads((path / "manifest.json").read_text())["files"]:
        found[int(Path(file["path"]).name.partition("-")[0][1:])] += file["nbytes"]
    return found


def show(every: list[dict[str, Any]], written: list[int], options: argparse.Namespace) -> None:
    """A table of bytes per rank, and the losses."""
    ranks, numel = len(every), every[0]["parameters"]
    state, mean = STATE_BYTES * numel / ranks, sum(written) / ranks
    print(f"\n{numel / 1e6:.1f} M parameters in {options.dtype}, {ranks} ranks; in bytes")
    print(f"{'rank':>4} {'state':>15} {'x 1/N':>7} {'checkpoint':>15} {'x mean':>7} {'moved':>15}")
    for rank, (seen, nbytes) in enumerate(zip(every, written, strict=True)):
        print(
            f"{rank:4} {seen['state bytes']:15,} {seen['state bytes'] / state:7.4f} "
            f"{nbytes:15,} {nbytes / mean:7.4f} {seen['bytes moved']:15,}"
        )
    print(f"losses of rank 0: {', '.join(f'{loss:.6f}' for loss in every[0]['losses'])}")


def by_batch(every: list[dict[str, Any]], steps: int) -> list[float]:
    """The losses of all batches in the order in which one process takes them."""
    shares = [len(seen["losses"]) // steps for seen in every]
    return [
        loss
        for step in range(steps)
        for seen, share in zip(every, shares, strict=True)
        for loss in seen["losses"][step * share : (step + 1) * share]
    ]


def compare(output: Path, other: Path) -> bool:
    """Says how far two runs are from each other; whether they have the same bits."""
    runs = [json.loads((folder / "result.json").read_text()) for folder in (output, other)]
    same = True
    for name in ("losses", "norms"):
        mine, theirs = (torch.tensor(run[name], dtype=torch.float64) for run in runs)
        if mine.shape != theirs.shape:
            raise SystemExit(f"{other} has other {name}; give the same --batches and --steps")
        same &= bool(torch.equal(mine, theirs))
        far = float(((mine - theirs) / theirs).abs().max())
        print(f"{name}: {'the same bits' if far == 0 else f'at most {far:.2e} of them apart'}")
    path, reference = (folder / "checkpoint" for folder in (output, other))
    names = [n for n in checkpoint.list_tensors(path) if n.startswith(("model.", "optimizer."))]
    equal = 0
    for name in names:
        mine, theirs = (leaf(checkpoint.load(p, only=[name])) for p in (path, reference))
        equal += torch.equal(mine, theirs)
    print(f"state in the end: {equal} of {len(names)} tensors have the same bits")
    return same and equal == len(names)


def leaf(tree: Any) -> torch.Tensor:
    """The only tensor of a tree."""
    while not isinstance(tree, torch.Tensor):
        (tree,) = tree.values() if isinstance(tree, dict) else tree
    return tree


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--nvme", required=True, help="a directory on a local SSD")
    add("--output", type=Path, required=True, help="folder for the checkpoint and result.json")
    add("--batches", type=int, help="in a step, of all ranks (default: one for each)")
    add("--compare", type=Path, metavar="OUTPUT", help="of another run with the same options")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add("--host-memory", default="512MiB", help="of each rank (default: %(default)s)")
    add("--steps", type=int, default=3)
    add("--layers", type=int, default=8)
    add("--width", type=int, default=1024)
    add("--batch", type=int, default=2, help="sequences in a batch")
    add("--sequence", type=int, default=128)
    add("--threads", type=int, default=1, help="of each rank")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    use_gpu = torch.cuda.is_available()
    torch.set_num_threads(options.threads)
    join("nccl" if use_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options.batches = options.batches or ranks
    if options.batches % ranks:
        raise SystemExit(f"--batches {options.batches} cannot be shared out evenly by {ranks}")
    settings = Settings(
        output=str(options.output),
        nvme=[options.nvme],
        host_memory=options.host_memory,
        device="cuda" if use_gpu else "cpu",
        steps=options.steps,
        layers=options.layers,
        width=options.width,
        batch=options.batch,
        sequence=options.sequence,
        learning_rate=3e-4,
        seed=1,
    )
    try:
        every = of_all_ranks(train(settings, options))
        if rank == 0:
            written = checkpoint_bytes(settings.checkpoint, ranks)
            show(every, written, options)
            result = {
                "losses": by_batch(every, options.steps),
                "norms": every[0]["norms"],
                "ranks": [
                    seen | {"checkpoint bytes": n} for seen, n in zip(every, written, strict=True)
                ],
            }
            (options.output / "result.json").write_text(json.dumps(result, indent=1))
            if options.compare is not None:
                compare(options.output, options.compare)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
