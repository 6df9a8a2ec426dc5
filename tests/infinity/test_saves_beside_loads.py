"""A save or snapshot of an offloaded model while another thread loads or restores."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from checkpoint import ChangedTensorError
from checkpoint.saving.api import start_save
from infinity.model import training_of
from infinity.values import loading, persistence
from tests.support.adamw_model import backward, make_model
from tests.support.training import least_budget, same_values, values_of


@pytest.mark.parametrize("saved_by", ["save", "save behind", "snapshot"])
@pytest.mark.parametrize("way", ["load", "restore"])
def test_what_is_saved_as_another_thread_loads_is_of_one_moment(
    way: str, saved_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values are those that are loaded, and steps and options still those before."""
    model, least = make_model(), least_budget(make_model, tmp_path)
    restore_scalars, is_midway = loading.restore_scalars, threading.Event()
    is_saved = threading.Event()

    def late(*arguments: Any) -> None:
        is_midway.set()
        is_saved.wait(0.5)  # not, where the save waits for this
        restore_scalars(*arguments)

    def save() -> None:
        is_midway.wait()
        if saved_by == "snapshot":
            offloaded.snapshot("beside")
        elif saved_by == "save":
            offloaded.save(tmp_path / "beside")
        else:
            offloaded.save(tmp_path / "beside", block=False).result()

    with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
        backward(model, 0)
        offloaded.step()
        offloaded.save(tmp_path / "first")
        offloaded.snapshot("first")
        for step in range(1, 3):
            backward(model, step)
            offloaded.step()
        monkeypatch.setattr(loading, "restore_scalars", late)
        with ThreadPoolExecutor(1) as other:
            saving = other.submit(save)
            saving.add_done_callback(lambda _: is_saved.set())
            if way == "load":
                offloaded.load(tmp_path / "first")
            else:
                offloaded.restore("first")
            failure = saving.exception()
        monkeypatch.undo()
        backward(model, 3)
        offloaded.step()
        with offloaded.gathered():
            expected = values_of(model)
        if failure is None:
            if saved_by == "snapshot":
                offloaded.restore("beside")
            else:
                offloaded.load(tmp_path / "beside")
            backward(model, 3)
            offloaded.step()
            with offloaded.gathered():
                assert same_values(values_of(model), expected)
        else:
            assert isinstance(failure, ChangedTensorError)


class _Counting(nn.Linear):
    """Has state that is no tensor, and is given it slowly."""

    count = 0

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.is_amid, self.is_saved = threading.Event(), threading.Event()

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, count: Any) -> None:
        self.is_amid.set()
        self.is_saved.wait(0.5)  # not, where the save waits for this
        self.count = count


def test_what_is_saved_as_modules_are_given_their_state_has_all_of_it(tmp_path: Path) -> None:
    """It had the weights that were loaded, and the state of modules from before."""
    model = nn.Sequential(make_model(), _Counting())
    counting = model[1]
    assert isinstance(counting, _Counting)

    def save() -> None:
        counting.is_amid.wait()
        offloaded.save(tmp_path / "beside")

    with infinity.offload(model, tmp_path, host_memory="1GiB") as offloaded:
        offloaded.save(tmp_path / "first")
        counting.count = 7
        with ThreadPoolExecutor(1) as other:
            saving = other.submit(save)
            saving.add_done_callback(lambda _: counting.is_saved.set())
            offloaded.load(tmp_path / "first")
            saving.result()
        counting.count = 8
        offloaded.load(tmp_path / "beside")
    assert counting.count == 0


def test_save_whose_caller_is_interrupted_as_it_has_begun_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes values waits for it, and so does the end of the block."""

    def interrupted(request: Any, **options: Any) -> None:
        start_save(request, **options)
        raise KeyboardInterrupt

    model = make_model()
    with infinity.offload(model, tmp_path, host_memory=least_budget(make_model, tmp_path)) as block:
        block.save(tmp_path / "first")
        backward(model, 0)
        block.step()
        with block.gathered():
            expected = values_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(persistence, "start_save", interrupted)
            with pytest.raises(KeyboardInterrupt):
                block.save(tmp_path / "second", block=False)
        assert training_of(block).saves.waits()
        block.load(tmp_path / "first")
        block.load(tmp_path / "second")
        with block.gathered():
            assert same_values(values_of(model), expected)
