"""Checkpoints through torch.distributed.checkpoint, by one process and by several."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from tests.checkpoint.trees import assert_same

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(1500, 1001, generator=generator),
            "b": torch.randn(7, generator=generator).to(torch.bfloat16),
            "turned": torch.randn(30, 40, generator=generator).t(),
            "scalar": torch.tensor(seed),
        },
        "optimizer": {"state": [{"m": torch.ones(5), "step": 3}], "groups": [1, 2.5, "x"]},
        "step": seed,
        "array": np.arange(5),
    }


def zeros_like(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeros_like(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [zeros_like(item) for item in tree]
    return type(tree)() if isinstance(tree, int | str) else tree * 0


@pytest.mark.parametrize("striped", [False, True])
def test_what_dcp_saves_dcp_loads(tmp_path: Path, stripes: list[Path], striped: bool) -> None:
    writer = checkpoint.dcp.StorageWriter(tmp_path / "step", stripes if striped else None)
    dcp_save(state(3), storage_writer=writer)
    live = zeros_like(state(3))
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(tmp_path / "step"))
    assert_same(state(3), live)
    assert checkpoint.verify(tmp_path / "step").ok


def test_what_dcp_saves_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    dcp_save(state(3), storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "step"))
    assert_same(state(3), checkpoint.load(tmp_path / "step"))
    loaded = checkpoint.load(tmp_path / "step", only=["model.*", "optimizer.state.0.m"])
    assert_same(
        {"model": state(3)["model"], "optimizer": {"state": [{"m": torch.ones(5)}]}}, loaded
    )


def test_what_save_saves_dcp_loads(tmp_path: Path, stripes: list[Path]) -> None:
    tied = state(4)
    tied["head"] = tied["model"]["w"][3:9]
    tied["columns"] = tied["model"]["w"][:, 1:3]
    checkpoint.save(tied, tmp_path / "step", stripes)
    live = zeros_like(tied)
    dcp_load(live, storage_reader=checkpoint.dcp.StorageReader(tmp_path / "step"))
    assert_same(tied, live)


def test_saving_again_replaces_at_once_and_leaves_nothing(
    tmp_path: Path, stripes: list[Path]
) -> None:
    for seed in range(3):
        writer = checkpoint.dcp.StorageWriter(tmp_path / "step", stripes)
        dcp_save(state(seed), storage_writer=writer)
    assert torch.equal(checkpoint.load(tmp_path / "step")["model"]["scalar"], torch.tensor(2))
    assert [len(list(stripe.iterdir())) for stripe in stripes] == [1, 1]
    assert sum(entry.is_dir() for entry in (tmp_path / "step").iterdir()) == 1


def test_the_checkpoint_id_of_the_call_counts(tmp_path: Path) -> None:
    writer = checkpoint.dcp.StorageWriter(tmp_path / "one")
    dcp_save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "two", storage_writer=writer)
    live = {"x": torch.zeros(3)}
    reader = checkpoint.dcp.StorageReader(tmp_path / "one")
    dcp_load(live, checkpoint_id=tmp_path / "two", storage_reader=reader)
    assert live["x"].sum() == 3
    assert not (tmp_path / "one").exists()


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp_save(state(1), storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "step"))
    before = sorted(tmp_path.rglob("*"))
    writer = checkpoint.dcp.StorageWriter(tmp_path / "step")

    def fail(*_: object) -> None:
        raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.saving.data_files.RankFiles.sync", fail)
        with pytest.raises(CheckpointException, match="the disk is gone"):
            dcp_save(state(2), storage_writer=writer)
    assert sorted(tmp_path.rglob("*")) == before
    dcp_save(state(2), storage_writer=writer)
    assert checkpoint.load(tmp_path / "step", only="model.scalar")["model"]["scalar"] == 2


def test_damage_is_refused(tmp_path: Path) -> None:
    dcp_save(state(1), storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "step"))
    (file,) = (tmp_path / "step").rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(50_000)
        opened.write(b"damage")
    reader = checkpoint.dcp.StorageReader(tmp_path / "step")
    with pytest.raises(CheckpointException, match=r"tensor 'model\.w'.*CRC-32C"):
        dcp_load(zeros_like(state(1)), storage_reader=reader)


RANKS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import checkpoint
path, store, rank, world, kind, *stripes = sys.argv[1:]
rank, world = int(rank), int(world)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
full = {"rows": torch.randn(1001, 300), "columns": torch.arange(70.0 * 33).view(70, 33),
        "few": torch.arange(3.0), "whole": torch.arange(10)}
for tensor in full.values():
    dist.broadcast(tensor, 0)
places = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "whole": Replicate()}
def sharded(values, turn=0):
    names = list(places)
    place = {name: places[names[(k + turn) % 2]] if k < 2 else places[name]
             for k, name in enumerate(names)}
    return {name: distribute_tensor(values[name], mesh, [place[name]]) for name in names}
if kind == "save":
    tree = {"model": sharded(full), "plain": torch.ones(4), "step": 7}
    dcp.save(tree, storage_writer=checkpoint.dcp.StorageWriter(path, stripes or None))
    if rank == 0:
        torch.save(full, path + ".expected")
else:
    expected = torch.load(path + ".expected")
    live = {"model": sharded({k: torch.zeros_like(v) for k, v in expected.items()}, turn=1),
            "plain": torch.zeros(4), "step": 0}
    dcp.load(live, storage_reader=checkpoint.dcp.StorageReader(path))
    for name, tensor in live["model"].items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    assert live["step"] == 7 and live["plain"].sum() == 4
dist.barrier()
dist.destroy_process_group()
sys.stderr.flush()
os._exit(0)  # torch has a thread of gloo end the process by abort(), now and then, at exit
"""


def ranks(kind: str, world: int, path: Path, *stripes: Path) -> None:
    store = path.parent / f"{kind}.store"
    commands = [
        [sys.executable, "-c", RANKS, str(path), str(store), str(rank), str(world), kind]
        + [str(stripe) for stripe in stripes]
        for rank in range(world)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    outcomes = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * world, "\n".join(outcomes)


@pytest.mark.proof
def test_shards_of_two_ranks_load_on_three_and_on_one(tmp_path: Path, stripes: list[Path]) -> None:
    path = tmp_path / "step"
    ranks("save", 2, path, *stripes)
    ranks("load", 3, path)
    report = checkpoint.verify(path)
    assert report.ok, str(report)
    expected = torch.load(tmp_path / "step.expected")
    assert_same(expected, checkpoint.load(path)["model"])
    group = checkpoint.open_zarr(path)
    assert np.array_equal(np.asarray(group["model/columns"]), expected["columns"].numpy())


def test_save_and_load_take_dtensors_of_one_rank(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rendezvous = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0)])
        checkpoint.save({"w": sharded}, tmp_path / "step")
        loaded = checkpoint.load(tmp_path / "step")["w"]
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, torch.arange(12.0).view(3, 4))
        live = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)])
        checkpoint.load(tmp_path / "step", into={"w": live})
        assert torch.equal(live.full_tensor(), loaded)
    finally:
        torch.distributed.destroy_process_group()


def test_a_save_in_the_background_goes_through_the_writer(tmp_path: Path) -> None:
    rendezvous = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
    try:
        tree = state(5)
        future = dcp_async_save(tree, storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "s"))
        assert isinstance(future, Future)
        future.result()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(checkpoint.load(tmp_path / "s")["model"]["w"], tree["model"]["w"])


def test_a_save_in_the_background_has_the_values_of_conjugated_and_negated_views(
    tmp_path: Path,
) -> None:
    values = torch.tensor([1 + 2j, -3j])
    views = {
        "conjugated": values.conj(),
        "imaginary": values.conj().imag,
        "negated": torch._neg_view(values),
    }
    expected = {name: view.resolve_conj().resolve_neg() for name, view in views.items()}
    writer = checkpoint.dcp.StorageWriter(tmp_path / "s")
    pending: Any = dcp_async_save({"a": [views], "plain": values}, storage_writer=writer)
    values.zero_()
    pending.result()
    loaded = checkpoint.load(tmp_path / "s")
    assert torch.equal(loaded["plain"], expected["conjugated"].conj())
    for name, value in expected.items():
        assert torch.equal(loaded["a"][0][name], value), name
