"""Saves that are interrupted, at any line: the old checkpoint or the new one is there, the next
save works, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from sweep_saves import KINDS, Case, Footing, Interrupter, Place, interrupt_points

import checkpoint
from aio.process.threads import Latch
from checkpoint.sheltered import StoppedError, Worker, describe, sheltered
from tests.support.held import Held
from tests.support.keyboard import keyboard_of
from tests.support.proof import matrix
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers of signals are those of before again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("on_main", "every", "first"), [(True, 97, 40), (False, 2003, 600)])
def test_an_interrupt_at_any_line_leaves_the_old_state_or_the_new_one_and_nothing_else(
    tmp_path: Path, kind: str, on_main: bool, every: int, first: int
) -> None:
    case = Case(kind, Place.make(tmp_path, 2 if kind == "copy" else 0))
    points = list(interrupt_points(case, on_main=on_main, every=every, first=first))
    assert len(points) > 2
    assert [point for point in points if point[1]] == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_kill_at_a_system_call_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, call: str
) -> None:
    code = (
        "import sys; from pathlib import Path; from sweep_saves import *\n"
        "torch.set_num_threads(1)\n"
        "case = Case('save', Place.make(Path(sys.argv[1]), 0))\n"
        "for point, faults in kill_points(case, sys.argv[2], 1): print(point, faults)"
    )
    script = Script(code, tmp_path, call)
    printed, errors = script.end()
    if "strace cannot attach" in errors:
        pytest.skip("strace cannot attach to a process here")
    assert script.returncode == 0, errors
    lines = printed.splitlines()
    assert len(lines) > 1
    assert [line for line in lines if not line.endswith("[]")] == []


def _interrupting(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """SIGINT comes when `Path.<name>` has been carried out, and before it returns."""
    carried_out: Callable[..., Any] = getattr(Path, name)
    handled = threading.Event()

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        handled.set()
        raise KeyboardInterrupt

    def call(self: Path, *arguments: Any) -> Any:
        result = carried_out(self, *arguments)
        if not handled.is_set():
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            assert handled.wait(60)
        return result

    signal.signal(signal.SIGINT, handle)
    monkeypatch.setattr(Path, name, call)


def _save(path: Path, value: int) -> None:
    checkpoint.save({"x": torch.full((1000,), value)}, path)


def _save_dcp(path: Path, value: int) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = checkpoint.dcp.StorageWriter(path)
    save({"x": torch.full((1000,), value)}, storage_writer=writer, no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [_save, _save_dcp])
def test_an_interrupt_behind_the_rename_of_the_manifest_leaves_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, int], None]
) -> None:
    save(tmp_path / "step", 1)
    with monkeypatch.context() as patched:
        _interrupting(patched, "replace")
        with pytest.raises((KeyboardInterrupt, checkpoint_exception())):
            save(tmp_path / "step", 2)
    assert bool((checkpoint.load(tmp_path / "step")["x"] == 2).all())
    save(tmp_path / "step", 3)
    assert bool((checkpoint.load(tmp_path / "step")["x"] == 3).all())
    assert len(list((tmp_path / "step").iterdir())) == 2


def checkpoint_exception() -> type[BaseException]:
    """What DCP makes of an exception of a rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


class _FailingHook:
    def register_step_pre_hook(self, hook: Any, /) -> NoReturn:
        raise RuntimeError("no hooks today")


def test_a_guard_that_cannot_be_hooked_leaves_the_path_free(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no hooks today"):
        checkpoint.save_async({"x": 1}, tmp_path / "step", guard=_FailingHook())
    checkpoint.save_async({"x": 2}, tmp_path / "step").result(60)
    assert checkpoint.load(tmp_path / "step") == {"x": 2}


@pytest.mark.parametrize("where", ["_thread.start_new_thread", "threading.Thread.start"])
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_finds_no_thread_says_so_and_leaves_the_path_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, background: bool
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    save = checkpoint.save_async if background else checkpoint.save
    with monkeypatch.context() as patched:
        patched.setattr(where, refuse)
        with pytest.raises(OSError, match="cannot start the thread checkpoint-save"):
            save({"x": 1}, tmp_path / "step")
    assert not (tmp_path / "step").exists()
    checkpoint.save({"x": 2}, tmp_path / "step")


def test_an_interrupted_step_waits_for_its_save_again(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(4)
    source = Held()
    pending = checkpoint.save_async({"s": source, "w": weight}, tmp_path / "step", guard=optimizer)
    assert source.reached.wait(60)
    main = threading.main_thread().ident
    assert main is not None
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def step() -> None:
        threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT)).start()
        optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        step()
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    assert not weight.any()
    source.opened.set()
    stepping.join()
    pending.result()
    assert not checkpoint.load(tmp_path / "step")["w"].any()


def test_work_that_is_withdrawn_before_it_begins_never_does() -> None:
    done: list[int] = []
    worker = Worker(lambda _: done.append(1), "never")
    worker.withdraw()
    assert worker.ended.is_set()
    worker.start()
    worker.ended.wait()
    assert done == []


class _Unspeakable(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("interrupt", "what"),
    [(SystemExit("preempted"), "SystemExit: preempted"), (_Unspeakable(), "_Unspeakable: ")],
)
def test_work_that_is_stopped_says_what_interrupted_it_first(
    interrupt: BaseException, what: str
) -> None:
    worker = Worker(lambda cancellation: cancellation.check(), "stopped")
    worker.withdraw(interrupt)
    worker.withdraw(KeyboardInterrupt())
    with pytest.raises(StoppedError) as stopped:
        worker.cancellation.check()
    assert describe(stopped.value) == what


def test_a_latch_that_is_waited_for_in_vain_can_be_set_later() -> None:
    latch = Latch()
    assert not latch.wait(0.001)
    latch.set()
    assert latch.wait()


def test_sheltered_work_raises_here_what_it_raised_there() -> None:
    def fail(_: object) -> NoReturn:
        raise StoppedError("there")

    with pytest.raises(StoppedError, match="there"):
        sheltered(fail, "test")
    assert sheltered(lambda _: threading.current_thread().name, "test") == "test"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("at_once", [True, False])
def test_sheltered_work_has_ended_when_the_second_interrupt_is_raised(at_once: bool) -> None:
    was_raised = threading.Event()
    steps: list[str] = []

    def work(_: object) -> None:
        if at_once:
            keyboard.press(signal.SIGINT, signal.SIGTERM)
        else:
            keyboard.press()
            keyboard.press()
        was_raised.wait(0.2)  # in vain, unless the interrupt is raised before the end
        steps.append("ended")

    with keyboard_of(signal.SIGINT, signal.SIGTERM) as keyboard:
        with pytest.raises(KeyboardInterrupt):
            sheltered(work, "test")
        at_the_interrupt = list(steps)
        was_raised.set()
    assert at_the_interrupt == ["ended"]


@pytest.mark.timeout(60)
def test_a_load_that_is_interrupted_twice_writes_nothing_afterwards(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(4, dtype=torch.uint8)}, tmp_path / "step")
    was_raised = threading.Event()
    written: list[bytes] = []

    class Sink:
        dtype, shape = torch.uint8, (4,)

        def write(self, start: int, data: memoryview) -> None:
            keyboard.press()
            keyboard.press()
            was_raised.wait(0.2)
            written.append(bytes(data))

    with keyboard_of(signal.SIGINT) as keyboard:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.load(tmp_path / "step", into={"x": Sink()})
        at_the_interrupt = list(written)
        was_raised.set()
    assert at_the_interrupt == [bytes([1, 1, 1, 1])]


FORKING = """
import os, sys, threading, torch, checkpoint
path = sys.argv[1]
release, hold = os.pipe()
class Forks:
    dtype, shape = torch.uint8, (4,)
    def read(self, start, out):
        reached.set()
        assert forked.wait(60)
reached, forked = threading.Event(), threading.Event()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
pending = checkpoint.save_async({"x": 1, "s": Forks()}, path, guard=optimizer)
assert reached.wait(60)
child = os.fork()
if child == 0:
    os.close(hold)
    optimizer.step()  # waits for no save of another process
    try:
        pending.result()
    except RuntimeError as error:
        print("child:", "forked" in str(error), flush=True)
    os.read(release, 1)  # lives on until the parent is done
    os._exit(0)
forked.set()
pending.result()
checkpoint.save({"x": 2}, path)
print("parent:", checkpoint.load(path)["x"], flush=True)
os.close(hold)
os.waitpid(child, 0)
"""


def test_a_child_forked_during_a_save_holds_no_lock_and_waits_for_nothing(tmp_path: Path) -> None:
    script = Script(FORKING, tmp_path / "step")
    printed, errors = script.end()
    assert script.returncode == 0, errors
    assert sorted(printed.splitlines()[:2]) == ["child: True", "parent: 2"]


def test_an_interrupted_load_ends_and_leaves_nothing_behind(tmp_path: Path) -> None:
    case = Case("save", Place.make(tmp_path, 2))
    case.save(case.state(1))
    interrupter = Interrupter()

    def load() -> None:
        case.loaded()

    load()
    footing = Footing.now()
    for target in range(3, 400, 53):
        interrupter.run(load, target, on_main=True, number=signal.SIGINT)
        load()
        assert footing.lost() == [], target


def _load_dcp(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    with contextlib.suppress(checkpoint_exception()):
        reader = checkpoint.dcp.StorageReader(path)
        load({"seed": 0, "large": torch.zeros(262_144)}, storage_reader=reader, no_dist=True)


READING: dict[str, Callable[[Path], object]] = {
    "verify": checkpoint.verify,
    "export": lambda path: checkpoint.export_safetensors(path, path.with_name("exported")),
    "dcp": _load_dcp,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "every"),
    matrix(
        [*product(("verify", "export"), (31, 97)), ("export", 197), ("dcp", 401), ("dcp", 1201)],
        usual=[("export", 197)],
    ),
)
def test_reading_that_is_interrupted_ends_and_leaves_nothing_behind(
    tmp_path: Path, name: str, every: int
) -> None:
    case = Case("save", Place.make(tmp_path, 2))
    case.save(case.state(1))
    interrupter = Interrupter()

    def work() -> None:
        READING[name](case.place.path)

    for target in (-1, 0):  # what comes with the first of its kind stays
        interrupter.run(work, target, on_main=True, number=signal.SIGINT)
    footing, target = Footing.now(), 5
    while interrupter.run(work, target, on_main=True, number=signal.SIGINT) or (
        interrupter.lines > target
    ):
        gc.collect()  # torch's loader leaves the interrupt, and all that it leads to, in a ring
        assert footing.lost() == [], target
        assert not list(tmp_path.glob("exported/*.tmp")), target
        work()
        target += every
    assert target > 5 * every


def test_a_load_in_inference_mode_writes_into_tensors_of_that_mode(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(3)}, tmp_path / "step")
    with torch.inference_mode():
        own = {"x": torch.zeros(3)}
        checkpoint.load(tmp_path / "step", into=own)
        checkpoint.save({"x": own["x"] * 2}, tmp_path / "step")
    assert own["x"].tolist() == [1, 1, 1]
    assert checkpoint.load(tmp_path / "step")["x"].tolist() == [2, 2, 2]
