"""DTensors of one process, and other tensors made of tensors: whose changes torch counts on them,
and whose memory is that of what they are made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import checkpoint
from checkpoint.plan.state_plan import plan_state
from checkpoint.plan.write_runs import plan_slots
from checkpoint.saving.unguarded import copied
from tests.support.held import Held


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def weight_of(mesh: DeviceMesh, numel: int = 1 << 18) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(torch.ones(numel), mesh, [Shard(0)]))


class Unhooked:
    """A guard that does not say what it changes."""

    def register_step_pre_hook(self, hook: Any) -> None:
        pass


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "initialised": lambda weight: torch.nn.init.zeros_(weight),
    "copied to": lambda weight: weight.copy_(weight * 3),
    "detached": lambda weight: weight.detach().mul_(2),
    "the local one": lambda weight: weight.to_local().mul_(2),
}


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "save"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_dtensor_that_changes_while_it_is_saved_is_an_error_with_its_name(
    tmp_path: Path, mesh: DeviceMesh, change: Callable[[torch.Tensor], object], is_guarded: bool
) -> None:
    weight = weight_of(mesh)
    checkpoint.save({"w": 1}, tmp_path / "step")
    reading = Held()
    state = {"source": reading, "w": weight}

    def change_it() -> None:
        assert reading.reached.wait(60)
        with torch.no_grad():
            change(weight)
        reading.opened.set()

    if is_guarded:
        pending = checkpoint.save_async(state, tmp_path / "step", guard=Unhooked())
        change_it()
        with pytest.raises(checkpoint.ChangedTensorError, match="'w'"):
            pending.result()
    else:
        thread = threading.Thread(target=change_it)
        thread.start()
        with pytest.raises(checkpoint.ChangedTensorError, match="'w'"):
            checkpoint.save(state, tmp_path / "step")
        thread.join()
    assert checkpoint.load(tmp_path / "step") == {"w": 1}


def test_a_tensor_that_changes_by_another_over_its_memory_is_an_error(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 10))
    reading = Held()
    state = {"source": reading, "master": weight.data, "w": weight}
    pending = checkpoint.save_async(state, tmp_path / "step", guard=Unhooked())
    assert reading.reached.wait(60)
    torch.nn.init.zeros_(weight)  # counted on the parameter alone
    reading.opened.set()
    with pytest.raises(checkpoint.ChangedTensorError, match="'master'"):
        pending.result()


def test_a_guarded_save_of_dtensors_holds_what_was_there_at_the_call(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    weight: Any = weight_of(mesh)
    optimizer = torch.optim.Adam([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"w": weight, "optimizer": optimizer.state_dict(), "plain": torch.ones(3)}
    expected = weight.detach().full_tensor().clone()
    pending = checkpoint.save_async(state, tmp_path / "step", guard=optimizer)
    optimizer.step()
    pending.result()
    assert torch.equal(checkpoint.load(tmp_path / "step")["w"], expected)


def _refuse(_: type, operation: object, *__: Any, **___: Any) -> Any:
    raise NotImplementedError(operation)


def wrapper_of(**parts: torch.Tensor) -> Any:
    """A tensor made of tensors, as optimizers of 8 bits keep their state; without parts, one that
    nothing says the memory of.
    """
    members: dict[str, Any] = {
        "__torch_dispatch__": classmethod(_refuse),
        "__torch_function__": vars(torch.nn.Parameter)["__torch_function__"],
    }
    if parts:
        members["__tensor_flatten__"] = lambda _: (list(parts), None)
        members["__tensor_unflatten__"] = staticmethod(_refuse)
    kind: Any = type("Wrapper", (torch.Tensor,), members)
    made = kind._make_wrapper_subclass(kind, (3,), dtype=torch.float32)
    vars(made).update(parts)
    return made


def test_what_a_guard_changes_behind_other_tensors_is_not_copied(mesh: DeviceMesh) -> None:
    weight, loose = weight_of(mesh, 8), torch.ones(8)
    optimizer = torch.optim.SGD([weight])
    numbers, scale = torch.ones(8), torch.ones(1)
    optimizer.state[weight] = {
        "quantized": wrapper_of(numbers=numbers, scale=scale),
        "elsewhere": wrapper_of(),
        "sparse": torch.ones(3).to_sparse(),
    }
    state = {"loose": loose, "numbers": numbers, "scale": scale, "w": weight}
    planned = plan_state(state).tensors
    kept = [
        new.record.name
        for old, new in zip(planned, copied(planned, optimizer), strict=True)
        if new.source.address == old.source.address
    ]
    assert kept == ["numbers", "scale", "w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_dtensor_that_changes_while_dcp_saves_it_is_an_error(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(mesh)

    def changing(*args: Any) -> Any:
        with torch.no_grad():
            weight.mul_(2)
        return plan_slots(*args)

    monkeypatch.setattr("checkpoint.transfer.filling.plan_slots", changing)
    with pytest.raises(CheckpointException, match="'w' was changed"):
        dcp_save({"w": weight}, storage_writer=checkpoint.dcp.StorageWriter(tmp_path / "step"))
    assert not (tmp_path / "step" / "manifest.json").exists()


def test_a_graph_from_before_a_load_of_a_dtensor_through_dcp_is_refused(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    weight = weight_of(mesh)
    assert isinstance(weight, DTensor)
    checkpoint.save({"w": torch.zeros(weight.numel())}, tmp_path / "old")
    loss = (weight * weight).sum()
    dcp_load({"w": weight}, storage_reader=checkpoint.dcp.StorageReader(tmp_path / "old"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
