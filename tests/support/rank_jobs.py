"""What single ranks do in tests, run by ``tests.support.ranks``."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import checkpoint
import infinity
from checkpoint.saving.data_files import RankFiles
from tests.support.models import Gpt, Recompute, Stack, seeded, tokens, vector_loss

DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATES = {"float32": torch.float32, "uint8": torch.uint8}


def gpt(recompute: Recompute = "no", width: int = 256, *, compiled: bool = False) -> nn.Module:
    model = Gpt(width=width, depth=2, recompute=recompute)
    for block in model.blocks if compiled else ():
        block.compile(backend="eager")
    return model


def loss_of(model: nn.Module, batch: int) -> torch.Tensor:
    rows = tokens(batch)
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def world() -> Any:
    """The group of all ranks, or None in a process that is alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def least_budget(make: Callable[[], nn.Module], nvme: Path, **options: Any) -> int:
    """The number that ``offload`` names when it is given too little."""
    try:
        with infinity.offload(make(), nvme, host_memory=1, process_group=world(), **options):
            raise AssertionError("one byte of host memory was taken for enough")
    except infinity.BudgetError as error:
        return error.least_host_bytes


def train_gpt(
    rank: int,
    folder: Path,
    *,
    name: str,
    steps: int,
    batches: list[list[int]],
    host_memory: int | str = "1GiB",
    dtype: str = "float32",
    max_grad_norm: float | None = None,
    overlap: bool = True,
    recompute: Recompute = "no",
    activations: str = "keep",
    max_parameter_bytes: int | None = None,
    state: str = "float32",
    compiled: bool = False,
) -> dict[str, Any]:
    """Train a GPT; in step ``s`` this rank takes the batches ``batches[rank]``, each ``+ 100 s``,
    with a gradient that is their mean (they accumulate). Values are left in ``<name>-<rank>``.

    ``host_memory="least"`` is the least that works.
    """
    make = partial(gpt, recompute, compiled=compiled)
    model = seeded(make)
    options: dict[str, Any] = {
        "compute_dtype": DTYPES[dtype],
        "max_grad_norm": max_grad_norm,
        "overlap": overlap,
        "activations": activations,
        "max_parameter_bytes": max_parameter_bytes,
        "optimizer": infinity.AdamW(lr=1e-2, state_dtype=STATES[state]),
    }
    if host_memory == "least":
        host_memory = least_budget(make, folder, **options)
    losses, norms = [], []
    mine = batches[rank]
    with infinity.offload(
        model, folder, host_memory=host_memory, process_group=world(), **options
    ) as offloaded:
        for step in range(steps):
            for batch in mine:
                loss = loss_of(model, batch + 100 * step)
                offloaded.backward(loss / len(mine))
                losses.append(loss.item())
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        offloaded.flush()
        report = offloaded.report().to_json()
    torch.save(dict(model.state_dict()), folder / f"{name}-{rank}")
    state_bytes = report["planned_bytes"]["state in host"]
    return {
        "losses": losses,
        "norms": norms,
        "state_bytes": state_bytes + report["planned_bytes"]["state on nvme"],
        "read_bytes": report["read_bytes"],
        "peak_host_bytes": report["peak_host_bytes"],
        "host_memory": host_memory,
    }


def train_each(rank: int, folder: Path, *, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``train_gpt`` with each of these arguments."""
    return [train_gpt(rank, folder, **run) for run in runs]


def exact_model() -> nn.Module:
    """Sums of linear layers of their own inputs: gradients do not depend on the weights, and are
    integers, so that adding them up and taking means is exact on any number of ranks.
    """
    return Sums()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(301, 257), (257, 90), (128, 512)]
        self.layers = nn.ModuleList(nn.Linear(wide, high) for wide, high in sizes)
        self.norm = nn.Parameter(torch.ones(77))

    def forward(self, number: int) -> torch.Tensor:
        """The loss of one sample."""
        rng = torch.Generator().manual_seed(number)
        total = (self.norm * torch.randint(-3, 4, (77,), generator=rng)).sum()
        for layer in self.layers:
            x = torch.randint(-2, 3, (layer.in_features,), generator=rng).float()  # type: ignore[arg-type]
            y = torch.randint(-2, 3, (layer.out_features,), generator=rng).float()  # type: ignore[arg-type]
            total = total + (layer(x) * y).sum()
        return total


SAMPLES = 12


def train_exactly(
    group: Any,
    folder: Path,
    *,
    first: int,
    load: Path | None = None,
    save: Path | None = None,
    block: bool = True,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Take two steps from ``first`` on, on batches of ``SAMPLES`` that all ranks share, between
    loading and saving a checkpoint; gives the norms, and the values in the end.
    """
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), group.size())
    model = seeded(exact_model)
    with infinity.offload(
        model,
        folder,
        host_memory="256MiB",
        compute_dtype=dtype,
        max_grad_norm=100.0,
        optimizer=infinity.AdamW(lr=1e-2),
        process_group=group,
    ) as offloaded:
        if load is not None:
            assert offloaded.load(load) == {"step": first}
        norms = []
        for step in range(first, first + 2):
            samples = range(rank, SAMPLES, world_size)
            loss = sum(model(SAMPLES * step + sample) for sample in samples)
            offloaded.backward(loss * world_size)
            offloaded.step()
            norms.append(offloaded.grad_norm.item())
        if save is not None:
            pending = offloaded.save(save, block=block, extra={"step": first + 2})
            if not block:
                pending.result()
        exported = folder / f"exported-{world_size}"
        if load is None:
            offloaded.export(exported)
    return {"norms": norms, "values": dict(model.state_dict())}


def reshard(rank: int, folder: Path) -> dict[str, Any]:
    """Every number of ranks saves a checkpoint, and every number goes on from each of them; gives
    the norms, by "first" for the time before the saves, and leaves values in ``folder``.
    """
    groups = [dist.new_group(range(count)) for count in range(1, dist.get_world_size() + 1)]
    norms: dict[str, Any] = {}
    counts = [count for count in range(1, len(groups) + 1) if rank < count]
    for count in range(1, len(groups) + 1):
        if count in counts:
            result = train_exactly(
                groups[count - 1],
                folder,
                first=0,
                save=folder / f"from-{count}",
                block=count != 3,
            )
            norms[f"first {count}"] = result["norms"]
        dist.barrier()
    for count in range(1, len(groups) + 1):
        for before in range(1, len(groups) + 1):
            if count in counts:
                path = folder / f"from-{before}"
                result = train_exactly(groups[count - 1], folder, first=2, load=path)
                norms[f"then {before} {count}"] = result["norms"]
                torch.save(result["values"], folder / f"values-{before}-{count}-{rank}")
        dist.barrier()
    return norms


# What ranks do wrong.


def stack(width: int = 256) -> nn.Module:
    return seeded(lambda: Stack(width=width, depth=3))


def complaint(run: Callable[[], Any]) -> str:
    """What ``run`` raises, its kind first; "" if nothing."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mistakes(rank: int, folder: Path) -> dict[str, str]:
    """What this rank is told in each case in which rank 1 differs from rank 0."""
    told: dict[str, str] = {}
    odd = rank == 1

    def train(
        model: nn.Module | None = None,
        *,
        nvme: Path = folder,
        within: Callable[[Any, nn.Module], None] | None = None,
        **options: Any,
    ) -> None:
        model = stack() if model is None else model
        with infinity.offload(
            model, nvme, host_memory="256MiB", process_group=world(), **options
        ) as offloaded:
            if within is not None:
                within(offloaded, model)
            vector_loss(model, 0).backward()
            offloaded.step()

    def reorder(offloaded: Any, model: nn.Module) -> None:
        if odd:
            model.layers = nn.ModuleList(reversed(model.layers))  # type: ignore[arg-type]

    def fail(offloaded: Any, model: nn.Module) -> None:
        if odd:
            raise KeyError("nothing of that name")

    def other_rate(offloaded: Any, model: nn.Module) -> None:
        if odd:
            offloaded.optimizer.param_groups[0]["lr"] = 0.5

    def leave_early(offloaded: Any, model: nn.Module) -> None:
        if odd:
            raise _LeftEarlyError

    def quietly() -> None:
        with suppress(_LeftEarlyError):
            train(within=leave_early)

    cases: dict[str, Callable[[], Any]] = {
        "model": lambda: train(stack(260) if odd else stack()),
        "values": lambda: train(seeded(lambda: Stack(depth=3), seed=int(odd))),
        "option": lambda: train(max_grad_norm=2.0 if odd else 1.0),
        "directory": lambda: train(nvme=folder / "missing" if odd else folder),
        "order": lambda: train(within=reorder),
        "failure": lambda: train(within=fail),
        "rate": lambda: train(within=other_rate),
        "early": quietly,
        "elementwise": lambda: train(optimizer=torch.optim.Adafactor),
        "device": lambda: train(device="tpu" if odd else "cpu"),
        "nothing": train,
    }
    for name, run in cases.items():
        told[name] = complaint(run)
    return told


class _LeftEarlyError(Exception):
    """A program leaves the block on one rank alone, and goes on."""


def failing_saves(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 runs out of space in a save, in the foreground and in the background; then all is
    well again.
    """
    told: dict[str, Any] = {}
    path = folder / "checkpoint"
    model = stack()
    with infinity.offload(model, folder, host_memory="256MiB", process_group=world()) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.step()
        offloaded.save(path)
        vector_loss(model, 1).backward()
        offloaded.step()
        write = RankFiles.write

        def full(self: Any, *arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "the disk of rank 1")

        if rank == 1:
            RankFiles.write = full  # type: ignore[assignment, method-assign]
        told["save"] = complaint(lambda: offloaded.save(path))
        told["save_async"] = complaint(lambda: offloaded.save(path, block=False).result())
        RankFiles.write = write  # type: ignore[method-assign]
        dist.barrier()
        told["steps"] = checkpoint.load(path, only=["infinity.steps.*"])["infinity"]["steps"]
        told["files"] = len(list(path.rglob("*.safetensors")))
        offloaded.save(path)
        dist.barrier()
        told["later"] = checkpoint.load(path, only=["infinity.steps.*"])["infinity"]["steps"]
    return told


def train_and_save(rank: int, folder: Path, *, root: str, steps: int, rest: bool = False) -> int:
    """Train exactly on from the newest checkpoint in ``root``, saving after every step; returns the
    step that it went on from.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = seeded(exact_model)
    steps_saved = checkpoint.Manager(root).steps()
    first = max(steps_saved, default=0)
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), max_grad_norm=100.0
    ) as offloaded:
        if first:
            offloaded.load(Path(root) / f"step-{first}")
        for step in range(first, steps):
            samples = range(rank, SAMPLES, world_size)
            loss = sum(model(SAMPLES * step + sample) for sample in samples)
            offloaded.backward(loss * world_size)
            offloaded.step()
            offloaded.save(Path(root) / f"step-{step + 1}", block=step % 2 == 0)
    torch.save(dict(model.state_dict()), folder / f"end-{rank}")
    return first
