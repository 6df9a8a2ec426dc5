"""One of two ranks that train with OffloadedAdamW under FSDP2 and DDP."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from infinity import OffloadedAdamW

SMALL = 6_600_000
AMPLE = "1GiB"
Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(301, 3001), nn.GELU(), nn.Linear(3001, 3))


def sharded() -> nn.Module:
    model = make_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def replicated() -> nn.Module:
    return DistributedDataParallel(make_model())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> list[torch.Tensor]:
    """The full parameters after three steps."""
    for step in range(first, first + 3):
        seed = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(4, 301, generator=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.detach().clone() for tensor in whole]


def check(make: Callable[[], nn.Module], folder: Path) -> None:
    model = make()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    results = []
    for budget in (AMPLE, SMALL):
        model = make()
        with OffloadedAdamW(
            model.parameters(), lr=1e-2, nvme=folder, host_memory=budget
        ) as optimizer:
            results.append(train(model, optimizer))
            assert (optimizer.report().nvme_bytes > 0) == (budget == SMALL)
            state = optimizer.state_dict()
            go_on = train(model, optimizer, 3)
    for ours, theirs in zip(results[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, *results))
    assert state["state"][0]["exp_avg"].shape == (3001, 301)
    resumed = make()
    with OffloadedAdamW(resumed.parameters(), lr=1e-2, nvme=folder, host_memory=SMALL) as optimizer:
        train(resumed, optimizer)
        optimizer.load_state_dict(state)
        assert all(map(torch.equal, train(resumed, optimizer, 3), go_on))


def train_as_torch(rank: int, folder: Path) -> None:
    check(sharded, folder)
    check(replicated, folder)
    dist.barrier()
