"""Everything of ours that a forked child may reach for: it is refused by name, or works, at once;
and the parent goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
import infinity
from aio import Engine
from checkpoint.dcp import StorageReader, StorageWriter
from tests.faults.test_forks import in_child
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import least_budget

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    # In a child, torch's own operations hang where they would compute on several threads.
    pytest.mark.usefixtures("one_thread"),
]
NAMES_BOTH = "process PARENT cannot be used in process CHILD"
WORKS = "returned "


def check(uses: dict[str, tuple[Callable[[], Any], str]]) -> None:
    """What each does in a child."""
    for name, (use, expected) in uses.items():
        found = in_child(use)
        assert expected in found, f"{name}: {found}"


@pytest.mark.timeout(200)
def test_offloaded_model_in_a_child_is_refused_at_every_entrance(tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    model = seeded(Stack)
    least = least_budget(lambda: seeded(Stack), nvme)
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        loss = vector_loss(model, 0)
        weight = model.layer(2).weight
        uses: dict[str, Callable[[], Any]] = {
            "forward": lambda: vector_loss(model, 0),
            "backward": loss.backward,
            "step": offloaded.step,
            "optimizer.step": offloaded.optimizer.step,
            "flush": offloaded.flush,
            "gathered": lambda: offloaded.gathered().__enter__(),
            "modify": lambda: offloaded.gathered(modify=True).__enter__(),
            "save": lambda: offloaded.save(tmp_path / "save"),
            "save behind": lambda: offloaded.save(tmp_path / "save", block=False).result(),
            "load": lambda: offloaded.load(tmp_path / "kept"),
            "export": lambda: offloaded.export(tmp_path / "export"),
            "clip": lambda: offloaded.clip_grad_norm_(1.0),
            "value": lambda: weight.sum().item(),
        }
        offloaded.save(tmp_path / "kept")
        check({name: (use, NAMES_BOTH) for name, use in uses.items()})
        assert not (tmp_path / "save").exists()
        loss.backward()
        offloaded.step()
        offloaded.save(tmp_path / "save")


@pytest.mark.timeout(200)
def test_offloaded_adamw_in_a_child_is_refused_at_every_entrance(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(1 << 19)) for _ in range(8)]
    weight = weights[-1]
    with pytest.raises(infinity.BudgetError) as caught:
        infinity.OffloadedAdamW(weights, nvme=tmp_path, host_memory=1)
    least = caught.value.least_host_bytes
    with infinity.OffloadedAdamW(weights, nvme=tmp_path, host_memory=least) as optimizer:
        for each in weights:
            each.grad = torch.ones_like(each)
        optimizer.step()
        uses: dict[str, Callable[[], Any]] = {
            "step": optimizer.step,
            "flush": optimizer.flush,
            "state_dict": optimizer.state_dict,
            "state": lambda: dict(optimizer.state[weight])["exp_avg"].sum(),
            "save": lambda: optimizer.save(tmp_path / "save"),
            "load": lambda: optimizer.load(tmp_path / "save"),
        }
        check({name: (use, "process PARENT") for name, use in uses.items()})
        assert in_child(optimizer.close) == "returned None"
        optimizer.step()


@pytest.mark.timeout(200)
def test_things_of_checkpoint_in_a_child_are_refused_or_work_at_once(tmp_path: Path) -> None:
    state = {"x": torch.ones(1000)}
    manager = checkpoint.Manager(tmp_path / "run")
    manager.save(1, state)
    dcp_save(state, storage_writer=StorageWriter(tmp_path / "dcp"), no_dist=True)
    opened = checkpoint.open(manager.path(1))
    reader, writer = StorageReader(tmp_path / "dcp"), StorageWriter(tmp_path / "dcp")
    engine = Engine()
    file = engine.open(tmp_path / "file", "w", size=4096)
    theirs = checkpoint.Manager(tmp_path / "run", engine=engine)
    stream = checkpoint.open_stream(tmp_path / "stream", "wb")
    stream.write(b"abc")
    zarr: Any = checkpoint.open_zarr(manager.path(1))
    refused = "PARENT"
    try:
        check(
            {
                "engine write": (lambda: engine.write(file, 0, bytes(4096)), refused),
                "engine open": (lambda: engine.open(tmp_path / "file"), refused),
                "engine drain": (engine.drain, refused),
                "engine close": (engine.close, "returned None"),
                "save with engine": (
                    lambda: checkpoint.save(state, tmp_path / "s", engine=engine),
                    refused,
                ),
                "load with engine": (
                    lambda: checkpoint.load(manager.path(1), engine=engine),
                    refused,
                ),
                "manager of an engine, save": (lambda: theirs.save(2, state), refused),
                "manager of an engine, load": (theirs.load, WORKS),
                "manager load": (lambda: manager.load()["x"].sum().item(), "returned 1000.0"),
                "manager latest": (manager.latest, "returned 1"),
                "opened": (lambda: opened["x"][0:3].sum().item(), refused),
                "zarr": (lambda: float(zarr["x"][0]), ""),
                "dcp read": (
                    lambda: dcp_load({"x": torch.zeros(1000)}, storage_reader=reader, no_dist=True),
                    WORKS,
                ),
                "dcp write": (
                    lambda: dcp_save(state, storage_writer=writer, no_dist=True) and None,
                    WORKS,
                ),
                "stream": (lambda: stream.write(b"def"), ""),
                "stream close": (stream.close, ""),
            }
        )
        engine.write(file, 0, bytes(4096)).result()
        manager.save(3, state)
        stream.close()
        assert (tmp_path / "stream").read_bytes() == b"abc"
        assert opened["x"][0:3].sum().item() == 3.0
        dcp_save(state, storage_writer=writer, no_dist=True)
    finally:
        file.close()
        engine.close()
        opened.close()


@pytest.mark.timeout(200)
def test_save_that_runs_is_refused_in_a_child_and_ends_in_the_parent(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path / "run")
    pending = manager.save_async(1, {"x": torch.ones(1 << 22)})
    found = in_child(lambda: manager.save(2, {"x": 1}).path.name)
    assert "PARENT" in found or found == "returned step-2", found
    pending.result()
    manager.save(3, {"x": 1})
