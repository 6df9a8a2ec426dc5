"""Single ranks in tests with other ways to share a model, run by ``tests.support.ranks``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import checkpoint
import infinity
from tests.support.models import vector_loss
from tests.support.rank_jobs import stack


def parallel_worlds(rank: int, folder: Path) -> None:
    """What offloaded ranks saved goes into FSDP2 through DCP; what FSDP2 and tensor parallelism
    save through DCP is the model.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = folder / "offloaded"
    model = stack()
    with infinity.offload(
        model, folder, host_memory="256MiB", process_group=dist.group.WORLD
    ) as offloaded:
        vector_loss(model, rank).backward()
        offloaded.step()
        offloaded.save(path)
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}

    sharded = stack()
    for layer in (*sharded.layers, sharded):  # type: ignore[misc]
        fully_shard(layer, mesh=mesh)
    live: dict[str, Any] = {"model": get_model_state_dict(sharded)}
    with torch.no_grad():
        for value in live["model"].values():
            value.zero_()
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(path))
    for name, value in live["model"].items():
        assert torch.equal(value.full_tensor(), expected[name]), name

    dcp_save(live, storage_writer=checkpoint.dcp.StorageWriter(folder / "fsdp2"))
    parallel = parallelize_module(
        stack(), mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    )
    live = {"model": get_model_state_dict(parallel)}
    assert sum(isinstance(value, DTensor) for value in live["model"].values()) == 4
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(path))
    dcp_save(live, storage_writer=checkpoint.dcp.StorageWriter(folder / "tensor-parallel"))
    for saved in ("fsdp2", "tensor-parallel"):
        loaded = checkpoint.load(folder / saved)["model"]
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), f"{saved}: {name}"
