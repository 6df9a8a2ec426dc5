"""Ranks that have something for themselves: running statistics, and what their caller gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.values import loading
from tests.support.models import seeded
from tests.support.rank_jobs import complaint

WIDTH = 16


def model_with_statistics() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    model.register_buffer("same", torch.arange(5.0))
    return model


def train(offloaded: Any, model: nn.Module, batches: torch.Generator) -> list[float]:
    """Two steps on batches of this rank's own; their losses."""
    losses = []
    for _ in range(2):
        loss = model(torch.randn(8, WIDTH, generator=batches) + torch.rand(1)).square().mean()
        loss.backward()
        offloaded.step()
        losses.append(loss.item())
    return losses


def resume(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save, train on; then load in a new block and train on: the same, with the statistics,
    the place of the data loader and the random state of each rank. One rank loads it, too.
    """
    torch.manual_seed(100 + rank)
    batches = torch.Generator().manual_seed(rank)
    path = folder / "checkpoint"
    told: dict[str, Any] = {}
    model = seeded(model_with_statistics)
    torch.manual_seed(100 + rank)
    with offload(model, folder, dist.group.WORLD) as offloaded:
        train(offloaded, model, batches)
        extra: dict[str, Any] = {
            "rank": rank,
            "loader": batches.get_state(),
            "view": torch.arange(6.0)[rank:],
        }
        offloaded.save(folder / "same", extra={"step": 2})
        offloaded.export(folder / "exported")
        statistics = model.get_buffer("1.running_mean").clone()
        pending = offloaded.save(path, block=False, extra=extra)
        extra["view"].zero_()
        told["losses"] = train(offloaded, model, batches)
        pending.result()
    model = seeded(model_with_statistics)
    with offload(model, folder, dist.group.WORLD) as offloaded:
        extra = offloaded.load(path)
        told["rank"] = extra["rank"]
        told["view"] = extra["view"].tolist()
        told["statistics"] = torch.equal(model.get_buffer("1.running_mean"), statistics)
        told["mean"] = statistics.tolist()
        batches.set_state(extra["loader"])
        told["again"] = train(offloaded, model, batches)
        elsewhere = folder / "elsewhere" / "checkpoint"
        told["other path"] = complaint(lambda: offloaded.load(folder / "same" if rank else path))
        told["other save"] = complaint(lambda: offloaded.load(elsewhere if rank else path))
        told["same"] = offloaded.load(folder / "same")
    dist.barrier()
    alone = dist.new_group([0])
    if rank == 0:
        model = seeded(model_with_statistics)
        with offload(model, folder, alone) as offloaded, _warnings() as told["warned"]:
            told["alone"] = offloaded.load(path)["rank"]
            told["alone mean"] = model.get_buffer("1.running_mean").tolist()
    return told


def more(rank: int, folder: Path, *, path: str) -> dict[str, Any]:
    """Load what fewer ranks saved."""
    model = seeded(model_with_statistics)
    with offload(model, folder, dist.group.WORLD) as offloaded, _warnings() as warned:
        extra = offloaded.load(path)
        mean = model.get_buffer("1.running_mean").tolist()
        return {"rank": extra["rank"], "mean": mean, "warned": warned}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is said of checkpoints meanwhile."""
    said: list[str] = []
    with mock.patch.object(
        loading.logger, "warning", lambda what, *values: said.append(what % values)
    ):
        yield said


def offload(model: nn.Module, folder: Path, group: Any) -> Any:
    return infinity.offload(
        model, folder, host_memory="256MiB", optimizer=infinity.AdamW(lr=1e-2), process_group=group
    )


def stopped(rank: int, folder: Path) -> dict[str, Any]:
    """A load that fails on rank 1 when values were changed, and rank 0 is at the step that was
    saved, what is refused then, and another.
    """
    batches = torch.Generator().manual_seed(rank)
    model = seeded(model_with_statistics)
    with offload(model, folder, dist.group.WORLD) as offloaded:
        train(offloaded, model, batches)
        offloaded.save(folder / "saved")
        train(offloaded, model, batches)
        failure = OSError("the disk failed") if rank else None
        with mock.patch.object(loading, "_load_own", wraps=loading._load_own, side_effect=failure):
            told = {"load": complaint(lambda: offloaded.load(folder / "saved"))}
        told["step"] = complaint(offloaded.step)
        told["save"] = complaint(lambda: offloaded.save(folder / "other"))
        offloaded.load(folder / "saved")
        train(offloaded, model, batches)
        return told


def grown(rank: int, folder: Path) -> dict[str, Any]:
    """Load what was saved where two buffers, one of them None at first, are longer on rank 1: into
    the model that has them, into one where both are None, and into one where one is as on rank 0.
    What each load, and a step behind the last, raises, and how long the buffers are.
    """
    path = folder / "saved"

    def load(model: nn.Module, offloaded: Any) -> list[Any]:
        raised = complaint(lambda: offloaded.load(path))
        return [raised, *(len(model.get_buffer(name)) for name in ("lazy", "seen"))]

    def made(seen: torch.Tensor | None) -> nn.Module:
        model = seeded(model_with_statistics)
        model.register_buffer("lazy", None)
        model.register_buffer("seen", seen)
        return model

    told: dict[str, Any] = {}
    model = made(torch.zeros(5))
    with offload(model, folder, dist.group.WORLD) as offloaded:
        model.lazy = torch.full((3 + rank,), float(rank))
        model.seen = torch.full((5 + rank,), float(rank))
        offloaded.save(path)
        told["in the block"] = load(model, offloaded)
    model = made(None)
    with offload(model, folder, dist.group.WORLD) as offloaded:
        told["made in a pass"] = load(model, offloaded)
    model = made(torch.zeros(5))
    with offload(model, folder, dist.group.WORLD) as offloaded:
        told["other shape"] = complaint(lambda: offloaded.load(path))
        batches = torch.Generator().manual_seed(rank)
        told["then"] = complaint(lambda: train(offloaded, model, batches))
    return told


class _Told(nn.Module):
    """Writes what it has been told into state dicts, and nothing before."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Any = None

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self.told is not None:
            destination[f"{prefix}told"] = self.told

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.told = state.get(f"{prefix}told")


def written(rank: int, folder: Path) -> dict[str, Any]:
    """Two modules are told something on rank 0 alone, and on rank 1 alone; a third on both."""
    model = nn.Sequential(nn.Linear(WIDTH, 1), *(_Told() for _ in range(3)))
    told: list[Any] = [*model][1:]
    with offload(model, folder, dist.group.WORLD) as offloaded:
        told[rank].told = told[2].told = rank
        offloaded.save(folder / "written")
        for module in told:
            module.told = None
        offloaded.load(folder / "written")
    return {"told": [module.told for module in told]}
