"""A block that ends while other threads take steps and snapshots in it."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from infinity.autograd.kept_views import KeptViews
from infinity.autograd.modifying import Loans
from infinity.autograd.residency import ModuleResidency
from infinity.ranks.context import SingleRank
from infinity.restoring import Restoring
from infinity.snapshots import points
from infinity.snapshots.moment import moment_of
from infinity.training import Training
from infinity.values import persistence
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


@pytest.mark.parametrize(("name", "block"), [("save_on", True), ("start_save", False)])
def test_the_end_waits_for_the_save_that_another_thread_begins(
    name: str, block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were closed beside it; behind training nobody was told."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    late = _Late(getattr(persistence, name))
    monkeypatch.setattr(persistence, name, late)
    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            backward(model, 0)
            offloaded.step()
            saving = other.submit(offloaded.save, tmp_path / "saved", block=block)
            late.has_come.wait()
        late.may_go_on.set()
        if not block:
            assert saving.result().done()
            saving.result().result()
        saving.result()
    saved = checkpoint.load(tmp_path / "saved", only=["model.*"])["model"]
    assert same_values(saved, values_of(model))


def test_the_end_waits_for_the_export_that_another_thread_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, least = make_model(), least_budget(make_model, tmp_path)
    late = _Late(checkpoint.write_safetensors)
    monkeypatch.setattr(checkpoint, "write_safetensors", late)
    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            exporting = other.submit(offloaded.export, tmp_path / "out")
            late.has_come.wait()
        late.may_go_on.set()
        assert exporting.result()


@pytest.mark.parametrize("call", ["save", "export", "load"])
def test_what_comes_to_save_or_load_when_the_block_ends_is_refused(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load would have changed what parameters are being given."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    values_of_one = Restoring._values_of
    is_late, may_begin = threading.Event(), threading.Event()

    def come_late(_rank: Any, _kind: int, _steps: Any, action: Any, *, tells: bool) -> Any:
        is_late.set()
        assert may_begin.wait(10)
        return action()

    def values_beside_call(restoring: Restoring, record: Any) -> torch.Tensor:
        may_begin.set()
        calling.exception()
        return values_of_one(restoring, record)

    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            offloaded.save(tmp_path / "saved")
            backward(model, 0)
            offloaded.step()
            with offloaded.gathered():
                trained = values_of(model)
            monkeypatch.setattr(SingleRank, "meet_for", come_late)
            monkeypatch.setattr(Restoring, "_values_of", values_beside_call)
            calling = other.submit(getattr(offloaded, call), tmp_path / "saved")
            is_late.wait()
            monkeypatch.setattr(Restoring, "_meet", lambda *_: None)
        with pytest.raises(RuntimeError, match="the block of the model ends"):
            calling.result()
    assert same_values(values_of(model), trained)


class _Late:
    """Tells that it has come; goes on when it may, or as the block waits for it."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.has_come, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.has_come.set()
        self.may_go_on.wait(0.5)  # not set, where the block waits for this
        return self._work(*arguments, **options)


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
    is_midway, is_detached, order = threading.Event(), threading.Event(), list[str]()

    def taken_late(*arguments: Any) -> None:
        is_midway.set()
        is_detached.wait(0.5)  # not set, where the block waits for this
        taken(*arguments)
        order.append("taken")

    def detached(residency: ModuleResidency) -> None:
        order.append("detached")
        is_detached.set()
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


def test_the_end_waits_for_changes_that_another_thread_has_kept_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parameters would have them, and others not."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    write_back, num_kept = SingleRank.write_back, 0
    is_midway, may_go_on = threading.Event(), threading.Event()

    def kept_late(*arguments: Any) -> None:
        nonlocal num_kept
        num_kept += 1
        if num_kept == 3:
            is_midway.set()
            may_go_on.wait(0.5)  # not set, where the block waits for this
        write_back(*arguments)

    def change() -> None:
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)

    monkeypatch.setattr(SingleRank, "write_back", kept_late)
    with ThreadPoolExecutor(1) as other:
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            changing = other.submit(change)
            is_midway.wait()
        may_go_on.set()
        changing.result()
    assert all((parameter == 3.0).all() for parameter in model.parameters())


def test_changes_that_another_thread_brings_when_the_block_ends_are_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for those no more, and some parameters would have them."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    write_back, end, num_kept = SingleRank.write_back, Loans.end, 0
    is_inside, may_leave, is_given_back = (threading.Event() for _ in range(3))

    def kept_late(*arguments: Any) -> None:
        nonlocal num_kept
        num_kept += 1
        if num_kept == 3:
            is_given_back.wait(10)
        write_back(*arguments)

    def end_beside(*arguments: Any) -> None:
        may_leave.set()
        wait([changing], 0.5)  # no longer, where changes are being kept
        end(*arguments)

    def change() -> None:
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
            is_inside.set()
            may_leave.wait(10)

    monkeypatch.setattr(SingleRank, "write_back", kept_late)
    monkeypatch.setattr(Loans, "end", end_beside)
    before = values_of(model)
    with ThreadPoolExecutor(1) as other:
        try:
            with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
                changing = other.submit(change)
                is_inside.wait()
        finally:
            is_given_back.set()
        with pytest.raises(RuntimeError, match="the offload block ended inside gathered"):
            changing.result()
    assert same_values(values_of(model), before)


def test_block_that_two_threads_leave_at_once_gives_back_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, least = make_model(), least_budget(make_model, tmp_path)
    block = infinity.offload(model, tmp_path, host_memory=least)
    with block.__enter__().gathered():
        before = values_of(model)
    values_of_one = Restoring._values_of

    is_leaving = threading.Event()

    def values_slowly(restoring: Restoring, record: Any) -> torch.Tensor:
        is_leaving.set()
        time.sleep(0.01)  # the other comes meanwhile
        return values_of_one(restoring, record)

    def leave() -> dict[str, torch.Tensor]:
        is_leaving.wait(10)
        block.__exit__(None, None, None)
        return values_of(model)

    monkeypatch.setattr(Restoring, "_values_of", values_slowly)
    with ThreadPoolExecutor(1) as other:
        left = other.submit(leave)
        block.__exit__(None, None, None)
        assert same_values(left.result(), before)
    assert same_values(values_of(model), before)
    assert list(tmp_path.iterdir()) == []
