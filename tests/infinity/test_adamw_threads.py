"""OffloadedAdamW is saved, read and loaded by one thread while another one takes steps."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import BudgetError, OffloadedAdamW
from infinity.adamw.changes import Changes, Hold
from infinity.adamw.engine import StateEngine
from infinity.adamw.tiers.store import StateStore
from tests.support.adamw_model import SMALL, backward, make_model, same, train, values

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]
CHANCE_SECONDS = 0.3
"""What another thread gets to do what it has to wait with: more than a step takes."""


class Trained:
    """A model and its optimizer after some steps, with gradients for another one."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.model = make_model()
        self.optimizer = OffloadedAdamW(
            self.model.parameters(), lr=1e-2, nvme=folder, host_memory=SMALL
        )
        train(self.model, self.optimizer, range(num_steps))
        backward(self.model, num_steps)

    def parameter(self) -> torch.Tensor:
        """One whose state is in part on NVMe."""
        return list(self.model.parameters())[2]

    def moments(self) -> list[torch.Tensor]:
        return tensors_of(self.optimizer.state_dict())

    def step_aside(self, monkeypatch: pytest.MonkeyPatch, method: str) -> threading.Thread:
        """A thread that takes a step as soon as something calls that method of the store."""
        plain: Callable[..., None] = getattr(StateStore, method)
        thread = threading.Thread(target=self.optimizer.step)
        calls: list[object] = []

        def call(*given: Any) -> None:
            calls.append(given)
            if len(calls) == 1:
                thread.start()
                thread.join(CHANCE_SECONDS)
            plain(*given)

        monkeypatch.setattr(StateStore, method, call)
        return thread


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[[int], Trained]]:
    made: list[Trained] = []

    def make(num_steps: int) -> Trained:
        made.append(Trained(tmp_path, num_steps))
        return made[-1]

    yield make
    for each in made:
        each.optimizer.close()


def tensors_of(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [value for state in state_dict["state"].values() for value in state.values()]


def test_save_beside_a_step_of_another_thread_is_of_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    here, later = trained(2), trained(3)
    before = here.moments()
    stepping = here.step_aside(monkeypatch, "read")
    here.optimizer.save(tmp_path / "saved")
    stepping.join()
    assert same(here.moments(), later.moments())
    here.optimizer.load(tmp_path / "saved")
    assert same(here.moments(), before)


def test_state_of_a_parameter_after_a_step_of_another_thread_is_whole(
    monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    here, later = trained(2), trained(3)
    read = StateEngine.read

    def read_after_a_step(engine: StateEngine, *given: Any) -> torch.Tensor:
        stepping = threading.Thread(target=here.optimizer.step)
        stepping.start()
        stepping.join()
        return read(engine, *given)

    state = here.optimizer.state[here.parameter()]
    with monkeypatch.context() as patch:
        patch.setattr(StateEngine, "read", read_after_a_step)
        moment = state["exp_avg"]
    assert torch.equal(moment, later.optimizer.state[later.parameter()]["exp_avg"])


def test_step_beside_a_load_of_another_thread_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    here, later = trained(2), trained(3)
    here.optimizer.save(tmp_path / "saved")
    here.optimizer.step()
    stepping = here.step_aside(monkeypatch, "write")
    here.optimizer.load(tmp_path / "saved")
    stepping.join()
    assert same(here.moments(), later.moments())


def test_step_beside_the_loading_of_a_state_dict_has_the_options_of_that(
    monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    """It had those from before, with the state that was loaded."""
    here, later = trained(2), trained(2)
    state, place = here.optimizer.state_dict(), StateEngine.place
    state["param_groups"][0]["lr"] = 1e-4
    later.optimizer.load_state_dict(state)
    later.optimizer.step()
    loading = threading.Thread(target=here.optimizer.load_state_dict, args=(state,))

    def place_late(*given: Any) -> None:
        place(*given)
        if not loading.ident:
            loading.start()
            loading.join()

    monkeypatch.setattr(StateEngine, "place", place_late)
    here.optimizer.step()
    assert same(values(here.model), values(later.model))


def test_state_dict_beside_the_loading_of_another_is_of_one_moment(
    monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    """It had the options that were loaded, with the state from before."""
    here = trained(2)
    state, read_all = here.optimizer.state_dict(), StateEngine.read_all
    state["param_groups"][0]["lr"] = 1e-4
    loading = threading.Thread(target=here.optimizer.load_state_dict, args=(state,))

    def read_early(*given: Any) -> Any:
        found = read_all(*given)
        loading.start()
        loading.join(CHANCE_SECONDS)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(StateEngine, "read_all", read_early)
        found = here.optimizer.state_dict()
    loading.join()
    assert found["param_groups"][0]["lr"] == 1e-2
    assert here.optimizer.param_groups[0]["lr"] == 1e-4


def test_step_that_looks_as_another_thread_begins_to_load_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    """It was told that the loading had been stopped."""
    here, later = trained(2), trained(3)
    here.optimizer.save(tmp_path / "saved")
    wait, write, is_amid, may_go_on = (
        Changes.wait,
        StateStore.write,
        threading.Event(),
        threading.Event(),
    )
    loading = threading.Thread(target=here.optimizer.load, args=(tmp_path / "saved",))

    def write_late(*given: Any) -> None:
        is_amid.set()
        may_go_on.wait(10)
        write(*given)

    def wait_early(changes: Changes) -> None:
        wait(changes)
        if not loading.ident:
            loading.start()
            is_amid.wait(10)
            threading.Timer(CHANCE_SECONDS, may_go_on.set).start()

    monkeypatch.setattr(StateStore, "write", write_late)
    monkeypatch.setattr(Changes, "wait", wait_early)
    here.optimizer.step()
    loading.join()
    assert same(here.moments(), later.moments())


def test_step_whose_closure_closes_the_optimizer_is_refused_and_changes_nothing(
    trained: Callable[[int], Trained],
) -> None:
    here, later = trained(2), trained(2)

    def closure() -> float:
        here.optimizer.close()
        return 0.0

    with pytest.raises(RuntimeError, match="is closed, and its state is gone"):
        here.optimizer.step(closure)
    assert same(values(here.model), values(later.model))


LATE: dict[str, Callable[[Trained, Path, dict[str, Any]], object]] = {
    "step": lambda here, _, __: here.optimizer.step(),
    "flush": lambda here, _, __: here.optimizer.flush(),
    "state_dict": lambda here, _, __: here.optimizer.state_dict(),
    "state": lambda here, _, __: here.optimizer.state[here.parameter()]["exp_avg"],
    "load_state_dict": lambda here, _, state: here.optimizer.load_state_dict(state),
    "save": lambda here, folder, _: here.optimizer.save(folder / "later"),
    "load": lambda here, folder, _: here.optimizer.load(folder / "saved"),
}


@pytest.mark.parametrize("call", LATE)
def test_call_whose_turn_comes_after_close_of_another_thread_is_refused_and_changes_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[int], Trained]
) -> None:
    here, later = trained(2), trained(2)
    here.optimizer.save(tmp_path / "saved")
    state = here.optimizer.state_dict()
    take_turn = Changes._take_turn
    closing = threading.Thread(target=here.optimizer.close)

    def take_turn_after_close(*given: Any) -> None:
        if threading.current_thread() is not closing and not closing.ident:
            closing.start()
            closing.join()
        take_turn(*given)

    monkeypatch.setattr(Changes, "_take_turn", take_turn_after_close)
    with pytest.raises(RuntimeError, match="is closed, and its state is gone"):
        LATE[call](here, tmp_path, state)
    assert same(values(here.model), values(later.model))
    assert not (tmp_path / "later").exists()


def test_group_that_is_refused_is_taken_back_and_none_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, small, large = (torch.nn.Parameter(torch.zeros(size)) for size in (8, 8, 1 << 20))
    with OffloadedAdamW([first], nvme=tmp_path, host_memory=5 << 20) as optimizer:
        place = OffloadedAdamW._place
        adding = threading.Thread(target=optimizer.add_param_group, args=({"params": [small]},))

        def place_after_another(*given: Any) -> None:
            if not adding.ident:
                adding.start()
                adding.join()
            place(*given)

        monkeypatch.setattr(OffloadedAdamW, "_place", place_after_another)
        with pytest.raises(BudgetError):
            optimizer.add_param_group({"params": [large]})
        assert [len(group["params"][0]) for group in optimizer.param_groups] == [8, 8]
        small.grad = torch.ones(8)
        optimizer.step()
    assert small.all()


def test_state_dicts_on_two_threads_at_once_are_both_whole(
    trained: Callable[[int], Trained],
) -> None:
    optimizer = trained(2).optimizer
    others: list[dict[str, Any]] = []

    def beside(_: torch.optim.Optimizer) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: others.append(optimizer.state_dict()))
        thread.start()
        thread.join()

    hook = optimizer.register_state_dict_pre_hook(beside)
    assert same(tensors_of(optimizer.state_dict()), tensors_of(others[0]))


class Looking:
    """Bytes of a checkpoint that are a look at the state of an optimizer."""

    thread_safe = True
    dtype = torch.float32

    def __init__(self, trained: Trained) -> None:
        self._state = trained.optimizer.state[trained.parameter()]
        self.shape = tuple(self._state["exp_avg"].shape)

    def read(self, start: int, out: memoryview) -> None:
        moment = self._state["exp_avg"]
        out[:] = moment.clone().numpy().tobytes()[start : start + len(out)]


def test_save_of_what_looks_at_the_state_itself_does_not_wait_for_its_own_end(
    tmp_path: Path, trained: Callable[[int], Trained]
) -> None:
    here = trained(2)
    here.optimizer.save(tmp_path / "saved", extra={"moment": Looking(here)})
    extra = here.optimizer.load(tmp_path / "saved")
    assert torch.equal(extra["moment"], here.optimizer.state[here.parameter()]["exp_avg"])


def test_change_by_the_thread_that_reads_under_a_hold_is_refused_and_later_made() -> None:
    changes, hold = Changes(), Hold(is_loading=False)

    def work() -> None:
        changes.make(partial(changes.begin, hold), alters=False)
        assert changes.make(lambda: 1, alters=False) == 1
        changes.make(lambda: 2)

    with pytest.raises(RuntimeError, match="while this very thread saves it"):
        changes.holding(hold, work)
    assert changes.make(lambda: 3) == 3


def test_another_hold_gives_way_to_a_change_that_waits_for_the_first_one() -> None:
    changes, first, second = Changes(), Hold(is_loading=False), Hold(is_loading=False)
    order: list[str] = []

    def begin(hold: Hold) -> None:
        changes.give_way()
        changes.make(partial(changes.begin, hold), alters=False)
        order.append("hold")

    begin(first)
    changing = threading.Thread(target=changes.make, args=(lambda: order.append("change"),))
    changing.start()
    while not changes._waiting:
        changing.join(0.01)
    saving = threading.Thread(target=begin, args=(second,))
    saving.start()
    saving.join(CHANCE_SECONDS)
    assert order == ["hold"]
    first.ended.set()
    changing.join()
    saving.join()
    second.ended.set()
    assert order == ["hold", "change", "hold"]
