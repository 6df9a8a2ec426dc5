"""Steps and loads that have looked whether something is lent before another thread asks for it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from infinity.autograd.modifying import Loans
from infinity.model import OffloadedModel
from infinity.ranks.context import SingleRank
from tests.support.adamw_model import backward, batch, make_model
from tests.support.training import least_budget, same_values, values_of


def _trained(folder: Path, beside: Callable[[OffloadedModel], None]) -> dict[str, torch.Tensor]:
    """What two steps make of the model, with something in place of the second one."""
    model, least = make_model(), least_budget(make_model, folder)
    with infinity.offload(model, folder, host_memory=least) as offloaded:
        backward(model, 0)
        offloaded.step()
        backward(model, 1)
        beside(offloaded)
    return values_of(model)


def _step(offloaded: OffloadedModel, _: Path) -> None:
    offloaded.step()


def _load(offloaded: OffloadedModel, saved: Path) -> None:
    offloaded.load(saved)


@pytest.mark.parametrize(("change", "modify"), [(_step, False), (_step, True), (_load, True)])
def test_a_change_that_began_before_a_parameter_was_lent_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[OffloadedModel, Path], None],
    modify: bool,
) -> None:
    """What was lent would be the values of before, and as it came back the change was lost."""
    check, has_looked, may_go_on = Loans.check_none, threading.Event(), threading.Event()

    def check_early(*arguments: Any) -> None:
        check(*arguments)
        has_looked.set()
        may_go_on.wait(10)

    def beside(offloaded: OffloadedModel) -> None:
        offloaded.save(tmp_path / "saved")
        with ThreadPoolExecutor(1) as other:
            monkeypatch.setattr(Loans, "check_none", check_early)
            changing = other.submit(change, offloaded, tmp_path / "saved")
            has_looked.wait()
            monkeypatch.undo()
            with offloaded.gathered(modify=modify):
                may_go_on.set()
                with pytest.raises(RuntimeError, match=r"a step or a load inside gathered\(\)"):
                    changing.result()
        offloaded.step()

    assert same_values(_trained(tmp_path, beside), _trained(tmp_path, OffloadedModel.step))


def test_what_is_lent_is_what_a_step_that_came_just_before_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, lent = Loans.begin, list[dict[str, torch.Tensor]]()

    def beside(offloaded: OffloadedModel) -> None:
        def begin_late(*arguments: Any) -> None:
            monkeypatch.undo()
            with ThreadPoolExecutor(1) as other:
                other.submit(offloaded.step).result()
            begin(*arguments)

        monkeypatch.setattr(Loans, "begin", begin_late)
        with offloaded.gathered(modify=True):
            lent.append(values_of(offloaded.model))

    trained = _trained(tmp_path, OffloadedModel.step)
    assert same_values(_trained(tmp_path, beside), trained)
    assert same_values(lent[0], trained)


@pytest.mark.parametrize("ends", [False, True])
def test_parameters_change_places_when_a_pass_of_another_thread_is_over(
    tmp_path: Path, ends: bool
) -> None:
    """It computed with what was on its way, or came to no end of asking for it."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    is_inside, may_go_on = threading.Event(), threading.Event()
    expected = model(batch(0)).detach()

    def late(*_: Any) -> None:
        is_inside.set()
        may_go_on.wait(10)

    with (
        infinity.offload(model, tmp_path, host_memory=least) as offloaded,
        ThreadPoolExecutor(2) as others,
    ):
        lending = offloaded.gathered()
        if ends:
            lending.__enter__()
        hook = next(iter(model.children())).register_forward_hook(late)
        computing = others.submit(model, batch(0))
        is_inside.wait()
        leave = partial(lending.__exit__, None, None, None)
        changing = others.submit(leave if ends else lending.__enter__)
        assert not wait([changing], 0.3).done
        may_go_on.set()
        assert torch.equal(computing.result(), expected)
        changing.result()
        hook.remove()
        if not ends:
            leave()


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_save_that_began_before_a_parameter_was_lent_has_all_changes_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_snapshot: bool
) -> None:
    """It had those of the parameters that were taken when it looked at what there was."""
    check, has_looked, may_go_on = Loans.check_unmodified, threading.Event(), threading.Event()
    write_back, is_saved = SingleRank.write_back, threading.Event()

    def check_early(*arguments: Any) -> None:
        check(*arguments)
        has_looked.set()
        may_go_on.wait(10)

    def write_back_late(*arguments: Any) -> None:
        write_back(*arguments)
        may_go_on.set()
        is_saved.wait(0.3)

    def save(offloaded: OffloadedModel) -> None:
        if is_snapshot:
            offloaded.snapshot("beside")
        offloaded.save(tmp_path / "saved", snapshot="beside" if is_snapshot else None)
        is_saved.set()

    def beside(offloaded: OffloadedModel) -> None:
        with ThreadPoolExecutor(1) as other:
            monkeypatch.setattr(Loans, "check_unmodified", check_early)
            saving = other.submit(save, offloaded)
            has_looked.wait()
            monkeypatch.setattr(SingleRank, "write_back", write_back_late)
            with offloaded.gathered(modify=True), torch.no_grad():
                for parameter in offloaded.model.parameters():
                    parameter.zero_()
            saving.result()
        monkeypatch.undo()

    _trained(tmp_path, beside)
    saved = checkpoint.load(tmp_path / "saved", only=["model.*"])["model"]
    assert len({bool(values.any()) for values in saved.values()}) == 1
