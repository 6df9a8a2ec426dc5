"""Saves in the background: what the caller may do meanwhile, and where errors go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import checkpoint
from aio.process.threads import WatchedThread
from checkpoint import threads
from checkpoint.sheltered import no_thread
from checkpoint.transfer import snapshot
from tests.checkpoint.trees import assert_same
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Gate:
    """A source that is read when the test lets it, and may fail then."""

    dtype = torch.uint8
    shape = (4,)

    def __init__(self, error: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.error = error

    def read(self, start: int, out: memoryview) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        if self.error is not None:
            raise self.error
        out[:] = b"gate"


def model_state() -> dict[str, Any]:
    return {
        "big": torch.randn(5 * MIB),
        "turned": torch.randn(900, 800).t(),
        "small": [torch.randn(k) for k in range(20)],
        "step": 4,
    }


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "big": state["big"].clone(),
        "turned": state["turned"].clone(),
        "small": [tensor.clone() for tensor in state["small"]],
    }


def spoil(state: dict[str, Any]) -> None:
    state["big"].zero_()
    state["turned"].zero_()
    for tensor in state["small"]:
        tensor.zero_()


@pytest.mark.parametrize("num_stripes", [0, 2])
@pytest.mark.parametrize("staging_bytes", [None, 1 * MIB, 9 * MIB])
def test_without_a_guard_tensors_may_change_when_the_call_returns(
    tmp_path: Path, num_stripes: int, staging_bytes: int | None
) -> None:
    stripes = [tmp_path / f"ssd{k}" for k in range(num_stripes)]
    for stripe in stripes:
        stripe.mkdir()
    state = model_state()
    expected = copy_of(state)
    pending = checkpoint.save_async(
        state, tmp_path / "step", stripes or None, staging_bytes=staging_bytes
    )
    assert pending.staged()
    spoil(state)
    info = pending.result()
    assert pending.done()
    assert info.nbytes == sum(t.nbytes for t in (expected["big"], expected["turned"])) + 4 * 190
    assert_same(expected, checkpoint.load(tmp_path / "step"))
    assert checkpoint.verify(tmp_path / "step").ok


def test_a_copy_in_waves_gives_a_small_file_beside_a_large_one_its_buffers(tmp_path: Path) -> None:
    stripes = [tmp_path / "ssd0", tmp_path / "ssd1"]
    for stripe in stripes:
        stripe.mkdir()
    state = {"large": torch.randn(400_000), "small": torch.ones(50)}
    checkpoint.save_async(state, tmp_path / "step", stripes, staging_bytes=MIB).result()
    assert_same(state, checkpoint.load(tmp_path / "step"))


def test_with_a_guard_the_next_step_waits_until_the_bytes_are_read(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = Gate()
    state = {"gate": gate, "weight": weight}
    for step in range(3):
        gate.opened.clear()
        gate.reached.clear()
        weight.grad = torch.ones(1000)
        before = weight.detach().clone()
        pending = checkpoint.save_async(state, tmp_path / "step", guard=optimizer)
        assert gate.reached.wait(60)
        assert not pending.staged()
        assert not pending.done()
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        assert torch.equal(weight, before), "the step began before its weight was read"
        gate.opened.set()
        stepping.join()
        assert pending.staged()
        assert pending.result(60).num_tensors == 2
        assert torch.equal(weight, before - 1)
        assert torch.equal(checkpoint.load(tmp_path / "step")["weight"], before), step
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_an_error_is_raised_by_result_and_only_there(tmp_path: Path) -> None:
    checkpoint.save({"x": 1}, tmp_path / "step")
    gate = Gate(RuntimeError("the source is gone"))
    gate.opened.set()
    pending = checkpoint.save_async({"gate": gate}, tmp_path / "step")
    with pytest.raises(RuntimeError, match="the source is gone") as caught:
        pending.result()
    assert "background save" in caught.value.__notes__[0]
    assert pending.done()
    assert checkpoint.load(tmp_path / "step") == {"x": 1}
    checkpoint.save({"x": 2}, tmp_path / "step")


@pytest.mark.parametrize("guarded", [True, False])
def test_an_error_nobody_asked_for_is_raised_by_the_next_save_to_the_path(
    tmp_path: Path, guarded: bool
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    gate = Gate(RuntimeError("the source is gone"))
    gate.opened.set()
    guard = optimizer if guarded else None
    checkpoint.save_async({"gate": gate}, tmp_path / "one", guard=guard).wait_done()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the source is gone"):
        checkpoint.save({"x": 1}, tmp_path / "one")
    assert not (tmp_path / "one").exists()
    checkpoint.save({"x": 1}, tmp_path / "one")


def test_an_old_error_is_logged_by_a_save_to_another_path_which_is_carried_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(RuntimeError("the source is gone"))
    gate.opened.set()
    failed = checkpoint.save_async({"gate": gate}, tmp_path / "one")
    failed.wait_done()
    checkpoint.save({"x": 1}, tmp_path / "two")
    assert checkpoint.load(tmp_path / "two") == {"x": 1}
    assert "nobody asked for its result" in caplog.text
    assert str(tmp_path / "one") in caplog.text
    with pytest.raises(RuntimeError, match="the source is gone"):
        failed.result()
    checkpoint.save({"x": 1}, tmp_path / "one")


def test_a_second_save_to_the_path_waits_for_the_first(tmp_path: Path) -> None:
    gate = Gate()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    first = checkpoint.save_async({"gate": gate}, tmp_path / "step", guard=optimizer)
    second = threading.Thread(target=checkpoint.save, args=({"x": 2}, tmp_path / "step"))
    second.start()
    assert gate.reached.wait(60)
    assert not first.done()
    gate.opened.set()
    second.join()
    assert first.done()
    assert checkpoint.load(tmp_path / "step") == {"x": 2}


def test_saves_that_wait_for_the_same_one_are_made_one_after_another(tmp_path: Path) -> None:
    gate = Gate()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    first = checkpoint.save_async({"gate": gate}, tmp_path / "step", guard=optimizer)
    pending: SimpleQueue[checkpoint.PendingSave] = SimpleQueue()

    def save(number: int) -> None:
        pending.put(checkpoint.save_async({"x": number}, tmp_path / "step"))

    others = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for other in others:
        other.start()
    assert gate.reached.wait(60)
    gate.opened.set()
    for other in others:
        other.join()
    first.result()
    assert all(pending.get_nowait().result().num_tensors == 0 for _ in others)
    assert checkpoint.load(tmp_path / "step")["x"] in range(8)


def test_result_can_time_out_and_be_asked_again(tmp_path: Path) -> None:
    gate = Gate()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    pending = checkpoint.save_async({"gate": gate}, tmp_path / "step", guard=optimizer)
    with pytest.raises(TimeoutError, match="has not ended"):
        pending.result(timeout=0)
    assert not pending.wait_staged(0)
    gate.opened.set()
    assert pending.result().num_tensors == 1


def test_what_cannot_be_saved_is_refused_by_the_call_itself(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]"):
        checkpoint.save_async({"a": object()}, tmp_path / "step")
    with pytest.raises(TypeError, match="register_step_pre_hook"):
        checkpoint.save_async({"a": 1}, tmp_path / "step", guard=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="staging"):
        checkpoint.save_async({"a": torch.ones(99999)}, tmp_path / "step", staging_bytes=1)
    assert not (tmp_path / "step").exists()


def test_a_guard_can_be_copied_and_saved_after_it_guarded(tmp_path: Path) -> None:
    import copy

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    checkpoint.save_async({"w": weight}, tmp_path / "step", guard=optimizer).result()
    copied = copy.deepcopy(optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    copied.step()


AT_EXIT = """
import sys, torch, checkpoint
class Source:
    dtype, shape = torch.uint8, (1 << 20,)
    def read(self, start, out):
        if sys.argv[3] == "fail":
            raise RuntimeError("the source is gone")
guard = None
if sys.argv[2] == "guard":
    guard = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
dirs = sys.argv[4:] or None
state = {"x": torch.ones(1 << 22), "s": Source()}
checkpoint.save_async(state, sys.argv[1], dirs, guard=guard)
"""


@pytest.mark.parametrize("how", ["guard", "copy"])
def test_a_save_that_runs_at_exit_is_finished(tmp_path: Path, how: str) -> None:
    stripes = [str(tmp_path / "a"), str(tmp_path / "b")]
    for stripe in stripes:
        Path(stripe).mkdir()
    script = Script(AT_EXIT, tmp_path / "step", how, "work", *stripes, ends_interpreter=True)
    _, errors = script.end()
    assert (script.returncode, errors) == (0, "")
    assert checkpoint.verify(tmp_path / "step").ok


def test_a_failure_nobody_asked_for_is_told_at_exit(tmp_path: Path) -> None:
    script = Script(AT_EXIT, tmp_path / "step", "copy", "fail", ends_interpreter=True)
    _, errors = script.end()
    assert "nobody asked for its result" in errors
    assert "the source is gone" in errors
    assert not (tmp_path / "step").exists()


AFTER_THE_SCRIPT = """
import atexit, pathlib, sys, threading, torch, checkpoint
folder = pathlib.Path(sys.argv[1])
def train():
    state = {"x": torch.ones(1 << 20), "turned": torch.ones(9, 5).t()}
    checkpoint.save_async(state, folder / "step").result()
    checkpoint.Manager(folder / "run").save_async(1, state).result()
def wait_and_train():
    threading.main_thread().join()
    train()
if sys.argv[2] == "thread":
    threading.Thread(target=wait_and_train).start()
else:
    atexit.register(train)
"""


@pytest.mark.parametrize("where", ["thread", "atexit"])
def test_a_save_that_begins_after_the_end_of_the_script_is_made(tmp_path: Path, where: str) -> None:
    """Thread pools of the standard library take no work then."""
    script = Script(AFTER_THE_SCRIPT, tmp_path, where, ends_interpreter=True)
    _, errors = script.end()
    assert (script.returncode, errors) == (0, "")
    assert checkpoint.verify(tmp_path / "step").ok
    assert checkpoint.Manager(tmp_path / "run").latest() == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_which_no_memory_is_left_to_take_note_has_ended_for_those_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("checkpoint.saving.pending._Registry.ended", fails)
    save = checkpoint.save_async if background else checkpoint.save
    saved = save({"x": torch.ones(3)}, tmp_path / "step")
    if isinstance(saved, checkpoint.PendingSave):
        saved = saved.result(timeout=60)
    assert saved.num_tensors == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("most", [2, 3])
def test_a_copy_in_waves_of_which_no_memory_is_left_to_tell_the_end_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The writer waited for ever for what it was to be told; `stop` tells it in the same way."""
    failed: list[object] = []

    class Queue:
        def __init__(self) -> None:
            queue: SimpleQueue[Any] = SimpleQueue()
            self.get, self.get_nowait, self._put = queue.get, queue.get_nowait, queue.put

        def put(self, item: object) -> None:
            is_end = item is None or isinstance(item, Exception)
            is_copier = threading.current_thread().name == "checkpoint-stage"
            if is_end and is_copier and len(failed) < most:
                failed.append(item)
                raise MemoryError
            self._put(item)

    monkeypatch.setattr(snapshot, "SimpleQueue", Queue)
    with pytest.raises(MemoryError):
        checkpoint.save_async(
            {"w": torch.ones(1 << 23)}, tmp_path / "checkpoint", staging_bytes=8 << 20
        ).result()
    assert len(failed) == most
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.timeout(60)
def test_a_copy_in_waves_of_which_one_stripe_has_no_thread_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stripes: list[Path]
) -> None:
    begin = threads.started

    def started(run: Callable[[], None], name: str) -> WatchedThread:
        if name == "checkpoint-stage-1":
            raise no_thread(name)
        return begin(run, name)

    monkeypatch.setattr(threads, "started", started)
    state = {"w": torch.zeros(4 << 20)}
    with pytest.raises(OSError, match="cannot start the thread checkpoint-stage-1"):
        checkpoint.save_async(state, tmp_path / "run", stripes, staging_bytes=1 << 20).result()
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    checkpoint.save_async(state, tmp_path / "run", stripes, staging_bytes=1 << 20).result()


class Elsewhere(torch.Tensor):
    """One whose values are where its class gets them from."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nobody asked for the values")


class Here(torch.Tensor):
    """One that torch answers for."""


def test_a_parameter_whose_memory_goes_elsewhere_meanwhile_keeps_no_save_from_beginning(
    tmp_path: Path,
) -> None:
    """As those of an offloaded model do where another thread computes: it was here just now."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    gone: Any = torch.Tensor._make_wrapper_subclass(Elsewhere, (3,))
    gone.__class__ = Here
    optimizer.param_groups[0]["params"].append(gone)
    checkpoint.save_async({"weight": weight}, tmp_path / "step", guard=optimizer).result()
    assert torch.equal(checkpoint.load(tmp_path / "step")["weight"], torch.ones(3))
