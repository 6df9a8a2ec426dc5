"""Ranks that differ, fail, or are killed: everybody is told why, nobody hangs, nothing saved is
lost.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from weakref import ref

import pytest
import torch

import checkpoint
import infinity
from infinity.block import OffloadBlock
from tests.support import rank_jobs
from tests.support.models import vector_loss
from tests.support.rank_jobs import stack, world
from tests.support.ranks import end_ranks, run_ranks, start_ranks


def test_what_differs_between_ranks_is_told_by_name_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(rank_jobs.mistakes, tmp_path, 2)
    for told in (first, second):
        assert told["model"].startswith("RankDifferenceError: parameter layers.0.weight is [")
        assert "the values of layers.0.weight is" in told["values"]
        assert "torch.manual_seed" in told["values"]
        assert told["option"].startswith("RankDifferenceError: max_grad_norm is 1.0 on rank 0")
        assert "fetches the weights of layers.0.weight" in told["order"]
        assert "fetches the weights of layers.2.weight" in told["order"]
        assert told["rate"].startswith("RankDifferenceError: lr of parameter group 0 is 0.001")
        assert told["elementwise"].startswith("ValueError: Adafactor looks at more than one")
        assert told["nothing"] == ""
    assert second["directory"].startswith("FileNotFoundError: nvme directory")
    assert first["directory"].startswith("RankFailedError: rank 1 failed: FileNotFoundError: nvme")
    assert second["failure"].startswith("KeyError")
    assert first["failure"] == "RankFailedError: rank 1 failed: KeyError: 'nothing of that name'"
    assert second["early"] == ""
    assert second["device"].startswith("ValueError: device='tpu' is not supported")
    assert first["device"].startswith("RankFailedError: rank 1 failed: ValueError: device='tpu'")
    assert first["early"].startswith("RankFailedError: rank 1 failed: _LeftEarlyError")
    assert list((tmp_path / ".infinity").glob("*")) == []


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(rank_jobs.failing_saves, tmp_path, 2)
    for name in ("save", "save_async"):
        assert second[name].startswith("OSError: [Errno 28]"), second[name]
        assert first[name].startswith("RankFailedError: rank 1 failed: OSError: [Errno 28]")
    for told in (first, second):
        assert set(told["steps"].values()) == {1}
        assert told["files"] == 2
        assert set(told["later"].values()) == {2}


@pytest.mark.proof
def test_killed_ranks_leave_a_checkpoint_that_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    root = tmp_path / "run"
    rng = random.Random(7)
    steps = 30
    for attempt in range(2):
        folder = tmp_path / f"attempt-{attempt}"
        ranks = start_ranks(
            rank_jobs.train_and_save, folder, 2, root=str(root), steps=steps, timeout_seconds=30
        )
        before = newest(root)
        while newest(root) < before + 2 and all(rank.poll() is None for rank in ranks):
            time.sleep(0.01 + 0.1 * rng.random())
        ranks[rng.randrange(2)].send_signal(signal.SIGKILL)
        codes = sorted(code for code, _ in end_ranks(ranks))
        assert codes == [-signal.SIGKILL, 1]
    went_on = run_ranks(
        rank_jobs.train_and_save, tmp_path / "end", 2, root=str(root), steps=newest(root) + 2
    )
    assert min(went_on) >= 4
    last = newest(root)
    (tmp_path / "alone").mkdir()
    rank_jobs.train_and_save(0, tmp_path / "alone", root=str(tmp_path / "other"), steps=last)
    expected = torch.load(tmp_path / "alone" / "end-0", weights_only=True)
    for rank in range(2):
        values = torch.load(tmp_path / "end" / f"end-{rank}", weights_only=True)
        assert all(torch.equal(value, values[name]) for name, value in expected.items())


@pytest.mark.proof
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks = start_ranks(
        rank_jobs.train_and_save, tmp_path / "a", 3, root=str(root), steps=10**6, timeout_seconds=3
    )
    while newest(root) < 1 and all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGSTOP)
    outcomes = end_ranks([ranks[0], ranks[2]])
    ranks[1].send_signal(signal.SIGKILL)
    end_ranks([ranks[1]])
    for code, told in outcomes:
        assert code == 1, told
        assert "RankFailedError: " in told, told
        assert "(ranks wait 3 s for others)" in told, told


def newest(root: Path) -> int:
    """The newest step that can be loaded; 0 for none."""
    return checkpoint.Manager(root).latest() or 0


def test_ranks_keep_no_model_of_a_backward_pass_that_another_rank_failed(tmp_path: Path) -> None:
    assert run_ranks(models_of_failed_passes, tmp_path, 2) == [[False, False], [False, False]]


def models_of_failed_passes(rank: int, folder: Path) -> list[bool]:
    """Rank 1 fails in three blocks. Whether the models of the first two are still in memory."""
    models = []
    for _ in range(3):
        model = stack()
        models.append(ref(model))
        with (
            suppress(KeyError, infinity.RankFailedError),
            infinity.offload(model, folder, host_memory="256MiB", process_group=world()),
        ):
            loss = vector_loss(model, 0)
            if rank == 1:
                raise KeyError("of a batch")
            loss.backward()
        del model, loss
        gc.collect()
    return [each() is not None for each in models[:2]]


def test_ranks_train_a_model_again_that_lost_its_values_in_other_ways_on_each(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(trained_after_a_failure, tmp_path, 2)
    assert first == second == ""


def trained_after_a_failure(rank: int, folder: Path) -> str:
    """Rank 0 fails in a block when rank 1 has a graph that is alive. What training raises then."""
    model = stack()

    def offload() -> OffloadBlock:
        return infinity.offload(model, folder, host_memory="256MiB", process_group=world())

    with offload() as offloaded:
        offloaded.save(folder / "saved")
    with suppress(KeyError, infinity.RankFailedError), offload():
        loss = vector_loss(model, 0)
        if rank == 0:
            del loss
            raise KeyError("of a batch")
        loss.backward()
    with offload() as offloaded:
        offloaded.load(folder / "saved")

        def train() -> None:
            vector_loss(model, 0).backward()
            offloaded.step()

        return rank_jobs.complaint(train)
