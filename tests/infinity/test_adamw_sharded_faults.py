"""Steps of OffloadedAdamW over FSDP2 that an error stopped."""

import errno
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aio import AioError, Engine
from aio.backends import MemoryBackend
from infinity import OffloadedAdamW
from swap.storage import opening
from tests.support.adamw_model import SMALL, backward, batch, make_model
from tests.support.ranks import run_ranks


def accumulate_before_flush(rank: int, folder: Path) -> None:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    failing = partial(Engine, MemoryBackend(seed=7, error=1.0, errno=errno.EIO))
    with (
        patch.object(opening, "Engine", failing),
        OffloadedAdamW(model.parameters(), nvme=folder, host_memory=SMALL) as optimizer,
    ):
        backward(model, 0)
        with pytest.raises(AioError):
            optimizer.step()
        model(batch(1))  # which gathers and lets go of the weights, and changes none
        with pytest.raises(AioError):
            optimizer.flush()
        backward(model, 1)  # adds to the shards that are behind the gradients
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            optimizer.flush()
    dist.barrier()


def test_shard_of_a_gradient_that_was_added_to_before_flush_is_refused(tmp_path: Path) -> None:
    run_ranks(accumulate_before_flush, tmp_path, 1)
