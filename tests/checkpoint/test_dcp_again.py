"""Saving and loading through DCP again: after failures, with kept plans, over one another."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
from checkpoint.dcp import StorageReader, StorageWriter
from checkpoint.directory.files.making import make_directory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(value: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value).to(dtype)}, "step": value, "list": [value]}


def saved(path: Path) -> int:
    loaded = checkpoint.load(path)
    assert loaded["model"]["w"].unique().tolist() == [loaded["step"]]
    assert loaded["list"] == [loaded["step"]]
    return int(loaded["step"])


class FailsAfterThePlan(DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise OSError(5, "the disk of another rank is gone")


def fail_to_save(writer: Any, value: int) -> None:
    with pytest.raises(CheckpointException, match="another rank is gone"):
        dcp_save(state(value), storage_writer=writer, planner=FailsAfterThePlan())


@pytest.mark.parametrize("same", [False, True])
def test_a_failed_save_can_be_tried_again_while_its_writer_lives(
    tmp_path: Path, same: bool
) -> None:
    dcp_save(state(1), storage_writer=StorageWriter(tmp_path / "s"))
    failed = StorageWriter(tmp_path / "s")
    fail_to_save(failed, 2)
    assert saved(tmp_path / "s") == 1
    again = failed if same else StorageWriter(tmp_path / "s")
    dcp_save(state(3), storage_writer=again)
    assert saved(tmp_path / "s") == 3
    assert sum(entry.is_dir() for entry in (tmp_path / "s").iterdir()) == 1


def test_who_saves_in_the_background_behind_a_failed_save_is_told_to_reset_the_writer(
    tmp_path: Path,
) -> None:
    def in_background(writer: StorageWriter) -> None:
        pending: Any = async_save(state(2), storage_writer=writer)
        pending.result()

    writer = StorageWriter(tmp_path / "s")
    fail_to_save(writer, 1)
    with pytest.raises(CheckpointException, match=r"has failed, call reset\(\) of the writer"):
        in_background(writer)
    writer.reset()
    in_background(writer)
    assert saved(tmp_path / "s") == 2
    fail_to_save(writer, 3)
    writer.reset()
    in_background(StorageWriter(tmp_path / "s"))
    assert saved(tmp_path / "s") == 2
    assert sum(entry.is_dir() for entry in (tmp_path / "s").iterdir()) == 1


def test_a_rank_with_other_stripes_than_the_first_one_is_refused_by_name(tmp_path: Path) -> None:
    stripe = tmp_path / "stripe"
    stripe.mkdir()
    first, second = StorageWriter(tmp_path / "s", [stripe]), StorageWriter(tmp_path / "s")
    planner = DefaultSavePlanner()
    planner.set_up_planner(state(1), None, True)
    plan = planner.create_local_plan()
    plans = first.prepare_global_plan([plan, plan])
    with pytest.raises(ValueError, match="rank 1 has 0 stripe_dirs, rank 0 has 1; give every rank"):
        second.write_data(plans[1], planner)
    first.reset()
    assert list(stripe.iterdir()) == []


def test_a_save_that_another_thread_runs_is_left_alone(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Waits(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            reached.set()
            go_on.wait()
            return super().finish_plan(new_plan)

    writer = StorageWriter(tmp_path / "s")
    thread = threading.Thread(
        target=lambda: dcp_save(state(1), storage_writer=writer, planner=Waits())
    )
    thread.start()
    reached.wait()
    another = StorageWriter(tmp_path / "s")
    for other, what in ((another, "another save to this"), (writer, "this StorageWriter is still")):
        with pytest.raises(CheckpointException, match=what):
            dcp_save(state(2), storage_writer=other)
    go_on.set()
    thread.join()
    assert saved(tmp_path / "s") == 1


def test_a_forked_child_that_drops_a_writer_leaves_the_save_alone(tmp_path: Path) -> None:
    writers = [StorageWriter(tmp_path / "s")]
    fail_to_save(writers[0], 1)
    before = sorted((tmp_path / "s").rglob("*"))
    assert before != []
    child = os.fork()
    if child == 0:
        writers.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted((tmp_path / "s").rglob("*")) == before
    writers.clear()
    gc.collect()
    checkpoint.save(state(2), tmp_path / "s")  # has the lock, and clears what is left
    assert len(list((tmp_path / "s").iterdir())) == 2


@pytest.fixture
def kept_plans() -> Iterator[None]:
    yield
    for name in vars(SavePlanner):
        if name.startswith("_cached"):
            getattr(SavePlanner, name).clear()


@pytest.mark.usefixtures("kept_plans")
def test_plans_that_the_planner_keeps_save_again_and_again(tmp_path: Path) -> None:
    for value in range(4):
        writer = StorageWriter(tmp_path / "s")
        dcp_save(
            state(value),
            storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        assert saved(tmp_path / "s") == value
    assert checkpoint.verify(tmp_path / "s").ok


@pytest.mark.usefixtures("kept_plans")
def test_a_dtype_that_changed_behind_a_kept_plan_is_the_one_that_is_saved(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        writer = StorageWriter(tmp_path / "s")
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp_save(state(3, dtype), storage_writer=writer, planner=planner)
        assert checkpoint.load(tmp_path / "s")["model"]["w"].dtype == dtype
        assert saved(tmp_path / "s") == 3


def test_a_reader_that_is_used_again_reads_what_is_there_now(tmp_path: Path) -> None:
    reader = StorageReader(tmp_path / "s")
    for value in (1, 2):
        dcp_save(state(value), storage_writer=StorageWriter(tmp_path / "s"))
        live: Any = {"model": {"w": torch.zeros(300)}, "step": 0}
        dcp_load(live, storage_reader=reader)
        assert live["step"] == value
        assert live["model"]["w"].unique().tolist() == [value]


def test_a_checkpoint_saved_over_while_it_is_loaded_is_not_called_corrupt(tmp_path: Path) -> None:
    class SavedOver(StorageReader):
        def prepare_global_plan(self, plans: Any) -> Any:
            dcp_save(state(2), storage_writer=StorageWriter(tmp_path / "s"))
            return super().prepare_global_plan(plans)

    dcp_save(state(1), storage_writer=StorageWriter(tmp_path / "s"))
    with pytest.raises(CheckpointException, match="saved over while it was being loaded"):
        dcp_load({"model": {"w": torch.zeros(300)}}, storage_reader=SavedOver(tmp_path / "s"))


def test_ranks_that_are_about_to_load_different_saves_are_stopped(tmp_path: Path) -> None:
    reader = StorageReader(tmp_path / "s")
    plans = []
    for value in (1, 2):
        dcp_save(state(value), storage_writer=StorageWriter(tmp_path / "s"))
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(RuntimeError, match="saved over"):
        reader.prepare_global_plan(plans)


def test_a_save_of_ours_can_follow_a_failed_one_whose_writer_lives(tmp_path: Path) -> None:
    failed = StorageWriter(tmp_path / "s")
    fail_to_save(failed, 1)
    checkpoint.save(state(2), tmp_path / "s")
    assert saved(tmp_path / "s") == 2
    fail_to_save(failed, 3)
    checkpoint.save_async(state(4), tmp_path / "s").result()
    assert saved(tmp_path / "s") == 4


def test_a_refused_save_of_the_same_writer_leaves_the_one_alone_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StorageWriter(tmp_path / "s")
    reached, go_on = threading.Event(), threading.Event()

    def waits(path: Path) -> list[Path]:
        reached.set()
        go_on.wait()
        return make_directory(path)

    monkeypatch.setattr("checkpoint.directory.lock.make_directory", waits)
    thread = threading.Thread(target=lambda: dcp_save(state(1), storage_writer=writer))
    thread.start()
    reached.wait()
    for path in (None, tmp_path / "other"):
        with pytest.raises(CheckpointException, match="this StorageWriter is still saving there"):
            dcp_save(state(2), storage_writer=writer, checkpoint_id=path)
    go_on.set()
    thread.join()
    assert saved(tmp_path / "s") == 1
    assert not (tmp_path / "other").exists()


def test_a_writer_that_is_saving_elsewhere_says_where(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "first")
    met, done = threading.Event(), threading.Event()

    def save() -> None:
        writer.prepare_global_plan([])
        met.set()
        done.wait()

    thread = threading.Thread(target=save)
    thread.start()
    met.wait()
    writer.reset(tmp_path / "second")
    with pytest.raises(BlockingIOError, match="this StorageWriter is still saving there") as caught:
        writer.prepare_global_plan([])
    assert caught.value.filename == str(tmp_path / "first")
    assert not (tmp_path / "second").exists()
    done.set()
    thread.join()


def test_a_schedule_of_a_checkpoint_of_ours_loads_through_dcp(tmp_path: Path) -> None:
    def scheduled(milestones: list[int]) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        return {"w": torch.ones(2), "s": schedule.state_dict()}

    state = scheduled([3, 5, 5])
    checkpoint.save(state, tmp_path / "step")
    live = scheduled([3, 5])
    dcp_load(live, storage_reader=StorageReader(tmp_path / "step"))
    milestones = live["s"]["milestones"]
    assert type(milestones) is Counter
    assert (milestones["3"], milestones["5"]) == (1, 2)  # DCP makes texts of keys
