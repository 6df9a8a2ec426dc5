"""A block that ends while other threads take steps and snapshots in it."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.autograd.kept_views import KeptViews
from infinity.autograd.residency import ModuleResidency
from infinity.restoring import Restoring
from infinity.snapshots import points
from infinity.snapshots.moment import moment_of
from infinity.training import Training
from swap.tiered import TieredState
from tests.support.adamw_model import backward, make_model
from tests.support.training import least_budget, same_values, values_of


def test_no_step_begins_while_values_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be those of two moments: of a Ctrl-C on the main thread, say, while it waits for
    one that trains.
    """
    model, least = make_model(), least_budget(make_model, tmp_path)
    take, values_of_one = TieredState._take, Restoring._values_of
    is_late, may_begin = threading.Event(), threading.Event()

    def take_late(*arguments: Any) -> None:
        is_late.set()
        assert may_begin.wait(10)
        take(*arguments)

    def values_beside_step(restoring: Restoring, record: Any) -> torch.Tensor:
        values = values_of_one(restoring, record)
        may_begin.set()
        stepping.exception()
        return values

    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            backward(model, 0)
            offloaded.step()
            with offloaded.gathered():
                before = values_of(model)
            backward(model, 1)
            monkeypatch.setattr(TieredState, "_take", take_late)
            monkeypatch.setattr(Restoring, "_values_of", values_beside_step)
            stepping = other.submit(offloaded.step)
            is_late.wait()
        with pytest.raises(RuntimeError, match="no step is taken any more"):
            stepping.result()
    assert same_values(values_of(model), before)


@pytest.mark.parametrize("name", ["keep_files", "save_on"])
def test_the_end_waits_for_the_snapshot_that_another_thread_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave back what that keeps, and the snapshot that was reported was gone."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    work, is_late, may_go_on = getattr(points, name), threading.Event(), threading.Event()

    def late(*arguments: Any, **options: Any) -> Any:
        is_late.set()
        may_go_on.wait(0.5)  # not set, where the block waits for this
        return work(*arguments, **options)

    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            backward(model, 0)
            offloaded.step()
            monkeypatch.setattr(points, name, late)
            taking = other.submit(offloaded.snapshot, "last")
            is_late.wait()
        may_go_on.set()
        taking.result()
    trained = values_of(model)
    monkeypatch.undo()
    with infinity.offload(make_model(), tmp_path, host_memory=least) as offloaded:
        offloaded.restore("last")
        with offloaded.gathered():
            assert same_values(values_of(offloaded.model), trained)


def test_a_snapshot_that_comes_when_the_block_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, least = make_model(), least_budget(make_model, tmp_path)
    is_late, may_go_on = threading.Event(), threading.Event()

    def late(*arguments: Any, **options: Any) -> Any:
        moment = moment_of(*arguments, **options)
        is_late.set()
        assert may_go_on.wait(10)
        return moment

    monkeypatch.setattr(points, "moment_of", late)
    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            taking = other.submit(offloaded.snapshot, "last")
            is_late.wait()
        may_go_on.set()
        with pytest.raises(RuntimeError, match="snapshots are nobody's any more"):
            taking.result()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_end_waits_for_a_step_that_another_thread_is_taking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the step is about to count in is taken down before."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    taken, detach = Training._taken, ModuleResidency.detach
    is_midway, order = threading.Event(), list[str]()

    def taken_late(*arguments: Any) -> None:
        is_midway.set()
        time.sleep(0.3)
        taken(*arguments)
        order.append("taken")

    def detached(residency: ModuleResidency) -> None:
        order.append("detached")
        detach(residency)

    monkeypatch.setattr(Training, "_taken", taken_late)
    monkeypatch.setattr(ModuleResidency, "detach", detached)
    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            backward(model, 0)
            stepping = other.submit(offloaded.step)
            is_midway.wait()
        stepping.result()
    assert order == ["taken", "detached"]


def test_a_step_goes_on_where_another_thread_looks_for_views_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a block: the step was stopped midway, and the model had no values."""
    now_alone = KeptViews._now_alone

    def beside(views: KeptViews) -> int | None:
        number = now_alone(views)
        if sys._getframe(1).f_code is KeptViews.expire_outdated.__code__:
            views._alone_from = None
        return number

    monkeypatch.setattr(KeptViews, "_now_alone", beside)
    model = make_model()
    with infinity.offload(model, tmp_path) as offloaded:
        backward(model, 0)
        offloaded.step()
        offloaded.flush()
