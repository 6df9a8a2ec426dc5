"""One of two ranks that save and load by the recipe of torch's tutorial.

The model is sharded by FSDP2, the optimizer torch's or ours.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoint.dcp import StorageReader, StorageWriter
from infinity import OffloadedAdamW


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def make_optimizer(model: nn.Module, folder: Path, *, ours: bool) -> torch.optim.Optimizer:
    if ours:
        return OffloadedAdamW(model.parameters(), lr=1e-2, nvme=folder, host_memory=5_800_000)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[torch.Tensor]:
    """The full parameters after two steps."""
    for step in range(first, first + 2):
        seed = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(4, 32, generator=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.detach().clone() for tensor in whole]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": state}


def check(folder: Path, expected: list[torch.Tensor], *, save_ours: bool, load_ours: bool) -> None:
    path = folder / f"saved-{save_ours}-{load_ours}"
    model = make_model()
    optimizer = make_optimizer(model, folder, ours=save_ours)
    train(model, optimizer, 0)
    save(state_of(model, optimizer), storage_writer=StorageWriter(path))
    assert all(map(torch.equal, train(model, optimizer, 2), expected))

    other = make_model()
    second = make_optimizer(other, folder, ours=load_ours)
    train(other, second, 7)
    live = state_of(other, second)
    load(live, storage_reader=StorageReader(path))
    set_state_dict(other, second, model_state_dict=live["model"], optim_state_dict=live["optim"])
    if not load_ours:
        second.param_groups[0]["fused"] = True
    assert all(map(torch.equal, train(other, second, 2), expected))


def save_and_load(rank: int, folder: Path) -> None:
    model = make_model()
    plain = make_optimizer(model, folder, ours=False)
    train(model, plain, 0)
    expected = train(model, plain, 2)
    check(folder, expected, save_ours=True, load_ours=True)
    check(folder, expected, save_ours=False, load_ours=True)
    check(folder, expected, save_ours=True, load_ours=False)
    dist.barrier()
