"""A save of an offloaded model while another thread takes a step."""

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from checkpoint import ChangedTensorError
from infinity.snapshots import moment
from infinity.snapshots.pending import PendingSnapshot
from infinity.snapshots.sources import tree_of
from swap.update.pipeline import UpdatePipeline
from swap.update.stages import Stages
from tests.support.adamw_model import backward, make_model
from tests.support.early_reads import before_reads
from tests.support.training import least_budget, same_values, values_of


def test_save_beside_a_step_of_another_thread_is_refused_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make_model(), list[None]()

    def step_beside() -> None:
        calls.append(None)
        if len(calls) == 1:
            stepping = threading.Thread(target=offloaded.step)
            stepping.start()
            stepping.join()

    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW()) as offloaded:
        backward(model, 0)
        offloaded.step()
        offloaded.save(tmp_path / "saved")
        with offloaded.gathered():
            before = next(model.parameters()).detach().clone()
        backward(model, 1)
        before_reads(monkeypatch, step_beside)
        with pytest.raises(ChangedTensorError):
            offloaded.save(tmp_path / "saved")
        offloaded.load(tmp_path / "saved")
        with offloaded.gathered():
            assert torch.equal(next(model.parameters()), before)


@pytest.mark.parametrize("way", ["save", "snapshot", "snapshot behind"])
def test_what_is_saved_as_another_thread_begins_a_step_is_of_one_moment(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small parameters are being updated then, and those on NVMe are still as before."""
    update_now, has_begun = Stages.update_now, threading.Event()

    def slowly(*arguments: Any) -> None:
        has_begun.set()
        time.sleep(0.5)
        update_now(*arguments)

    model, least = make_model(), least_budget(make_model, tmp_path)
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        backward(model, 0)
        monkeypatch.setattr(Stages, "update_now", slowly)
        stepping = threading.Thread(target=offloaded.step)
        stepping.start()
        has_begun.wait()
        if way == "save":
            offloaded.save(tmp_path / "saved")
        elif way == "snapshot":
            offloaded.snapshot("a")
        else:
            offloaded.snapshot("a", block=False).result()
        stepping.join()
        with offloaded.gathered():
            stepped = values_of(model)
        if way == "save":
            offloaded.load(tmp_path / "saved")
        else:
            offloaded.restore("a")
        with offloaded.gathered():
            assert same_values(values_of(model), stepped)


@pytest.mark.parametrize("way", ["save", "flush"])
def test_a_save_waits_for_no_step_that_is_still_to_be_taken(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass begins to update ahead of it just as the save waits for the step before."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    join, is_waiting, is_ahead = UpdatePipeline.join, threading.Event(), threading.Event()
    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        act = offloaded.flush if way == "flush" else partial(offloaded.save, tmp_path / "saved")
        saving = threading.Thread(target=act, daemon=True)

        def wait_late(pipeline: UpdatePipeline) -> None:
            if threading.current_thread() is saving:
                is_waiting.set()
                is_ahead.wait(10)
            join(pipeline)

        for step in range(3):
            backward(model, step)
            offloaded.step()
        offloaded.flush()
        monkeypatch.setattr(UpdatePipeline, "join", wait_late)
        saving.start()
        is_waiting.wait()
        backward(model, 3)
        is_ahead.set()
        saving.join(10)
        has_waited = saving.is_alive()
        offloaded.step()
        saving.join()
        assert not has_waited


@pytest.mark.parametrize("block", [True, False])
def test_a_snapshot_beside_a_backward_pass_has_what_is_there_before_the_step(
    block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is updated ahead of a step changes nothing that is at home."""
    model, least = make_model(), least_budget(make_model, tmp_path)

    def beside_backward(*arguments: Any, **options: Any) -> Any:
        tree = tree_of(*arguments, **options)
        other = threading.Thread(target=backward, args=(model, 3))
        other.start()
        other.join()
        return tree

    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        for step in range(3):
            backward(model, step)
            offloaded.step()
        with offloaded.gathered():
            before = values_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(moment, "tree_of", beside_backward)
            taken = offloaded.snapshot("a", block=block)
        offloaded.step()
        if isinstance(taken, PendingSnapshot):
            taken.result()
        offloaded.restore("a")
        with offloaded.gathered():
            assert same_values(values_of(model), before)
