"""What a failed load or save was given goes with its last reference: models are large."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.sheltered import Cancellation
from tests.support.memory import folder_in_memory
from tests.support.proof import matrix

tmp_path = folder_in_memory()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of two steps, of which the second is damaged where only reading it all tells."""
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (file,) = manager.path(2).rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    return tmp_path / "run"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Refusing:
    """A sink that raises."""

    dtype = torch.float32
    shape = (4,)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def write(self, start: int, data: memoryview) -> None:
        try:
            raise KeyError
        finally:
            raise ValueError("refused")


WAYS: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "damage": lambda root, into: checkpoint.load(root / "step-2", into={"w": into}),
    "nothing there": lambda root, into: checkpoint.load(root / "step-3", into={"w": into}),
    "another name": lambda root, into: checkpoint.load(root / "step-1", into={"v": into}),
    "a sink": lambda root, into: checkpoint.load(root / "step-1", into={"w": Refusing(into)}),
    "by number": lambda root, into: checkpoint.Manager(root).load(2, into={"w": into}),
    "no such step": lambda root, into: checkpoint.Manager(root).load(3, into={"w": into}),
    "another name, latest": lambda root, into: checkpoint.Manager(root).load(into={"v": into}),
    "a sink, latest": lambda root, into: checkpoint.Manager(root).load(into={"w": Refusing(into)}),
}


def _is_gone(watch: weakref.ref[torch.Tensor]) -> bool:
    """A thread that has told its outcome has yet to end, and has its work until then."""
    until = time.monotonic() + 10
    while watch() is not None and time.monotonic() < until:
        time.sleep(0.001)
    return watch() is None


def _failed(load: Callable[[torch.Tensor], object]) -> weakref.ref[torch.Tensor]:
    into = torch.zeros(4)
    with suppress(ValueError, TypeError, OSError):
        load(into)
        pytest.fail("it has not failed")
    return weakref.ref(into)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", matrix(WAYS, usual=[*WAYS][::2]))
def test_what_a_failed_load_was_given_goes_with_its_last_reference(root: Path, way: str) -> None:
    assert _failed(lambda into: WAYS[way](root, into))() is None


class Interrupting:
    """A source whose read is interrupted, as by Ctrl-C, and ends when the save was told to stop."""

    dtype = torch.float32
    shape = (4,)

    def __init__(self, tensor: torch.Tensor, told: threading.Event) -> None:
        self.tensor, self._told = tensor, told

    def read(self, start: int, out: memoryview) -> None:
        signal.raise_signal(signal.SIGALRM)
        assert self._told.wait(20)


class Interrupt(BaseException):
    """Raised by the handler."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a save was told to stop, which an alarm does here."""
    told, request = threading.Event(), Cancellation.request

    def requested(self: Cancellation, interrupt: BaseException | None = None) -> None:
        request(self, interrupt)
        told.set()

    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(Cancellation, "request", requested)
    before = signal.signal(signal.SIGALRM, interrupt)
    yield told
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async])
def test_what_an_interrupted_save_was_given_goes_with_its_last_reference(
    tmp_path: Path, save: Callable[..., Any], told: threading.Event
) -> None:
    state = {"w": Interrupting(torch.zeros(4), told)}
    watch = weakref.ref(state["w"].tensor)
    with pytest.raises(Interrupt):
        save(state, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    del state
    assert watch() is None


REFUSED: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "a path": lambda root, w: checkpoint.save({"w": w}, root / "\0"),
    "a path, behind": lambda root, w: checkpoint.save_async({"w": w}, root / "\0"),
    "a step": lambda root, w: checkpoint.Manager(root).save(-1, {"w": w}),
    "a step, behind": lambda root, w: checkpoint.Manager(root).save_async(-1, {"w": w}),
    "a value": lambda root, w: checkpoint.save({"w": w, "v": object()}, root / "new"),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", REFUSED)
def test_what_a_refused_save_was_given_goes_with_its_last_reference(root: Path, way: str) -> None:
    assert _failed(lambda w: REFUSED[way](root, w))() is None


class Failing:
    """A source that raises."""

    dtype = torch.float32
    shape = (4,)

    def read(self, start: int, out: memoryview) -> None:
        raise ValueError("refused")


class Several(Failing):
    """So large that several threads read it, or write it, and fail."""

    shape = (3_000_000,)
    thread_safe = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def write(self, start: int, data: memoryview) -> None:
        raise ValueError("refused")


def _behind(state: Any, path: Path, stripes: list[Path] | None, staging_bytes: int | None) -> None:
    checkpoint.save_async(state, path, stripes, staging_bytes=staging_bytes).result()


SEVERAL: dict[str, Callable[[Any, Path, list[Path]], object]] = {
    "save": lambda state, path, stripes: checkpoint.save(state, path, stripes),
    "behind": lambda state, path, stripes: _behind(state, path, stripes, None),
    "in waves": lambda state, path, stripes: _behind(state, path, stripes, 1 << 20),
    "in waves, to one": lambda state, path, _: _behind(state, path, None, 1 << 20),
    "load": lambda state, path, _: checkpoint.load(path, into=state),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_apart", [False, True], ids=["main", "another thread"])
@pytest.mark.parametrize("way", SEVERAL)
def test_what_fails_on_several_threads_goes_with_its_last_reference(
    tmp_path: Path, way: str, is_apart: bool
) -> None:
    stripes = [tmp_path / "a", tmp_path / "b"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save({"w": torch.zeros(Several.shape)}, tmp_path / "saved", stripes)

    def failed() -> weakref.ref[torch.Tensor]:
        return _failed(lambda w: SEVERAL[way]({"w": Several(w)}, tmp_path / "saved", stripes))

    if not is_apart:
        assert _is_gone(failed())
        return
    with ThreadPoolExecutor(1) as threads:
        assert _is_gone(threads.submit(failed).result())


@pytest.mark.usefixtures("no_collector")
def test_a_manager_holds_nothing_of_whoever_was_told_of_an_error(root: Path) -> None:
    manager = checkpoint.Manager(root)
    assert _is_gone(_failed(lambda _: manager.save_async(3, {"w": Failing()}).result()))
    manager.save_async(3, {"w": Failing()}).wait_done()
    gc.collect()
    with pytest.raises(ValueError, match="refused"):
        manager.save(4, {"w": torch.zeros(4)})
    manager.save(4, {"w": torch.zeros(4)})


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("value", [torch.zeros(4), Failing()])
def test_a_save_that_is_over_holds_nothing_of_its_manager(
    tmp_path: Path, value: object, is_asked: bool
) -> None:
    """It has memory for copies, of all that is saved."""
    manager = checkpoint.Manager(tmp_path / "new")
    pending = manager.save_async(1, {"w": value})
    pending.wait_done()
    if is_asked:
        with suppress(ValueError):
            pending.result()
    watch = weakref.ref(manager)
    del manager
    assert watch() is None
    with suppress(ValueError):
        pending.result()


def test_an_error_of_a_sink_is_shown_without_what_brought_it(root: Path) -> None:
    with pytest.raises(ValueError, match="refused") as caught:
        checkpoint.load(root / "step-1", into={"w": Refusing(torch.zeros(4))})
    assert caught.value.__cause__ is None
    assert isinstance(caught.value.__context__, KeyError)


def _verified(path: Path) -> tuple[weakref.ref[torch.Tensor], checkpoint.VerifyReport]:
    beside = torch.zeros(4)
    try:
        raise KeyError  # of what a report of damage says nothing
    except KeyError:
        return weakref.ref(beside), checkpoint.verify(path)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("file", ["manifest.json", "data"])
def test_a_report_of_damage_holds_nothing_of_whoever_asked_for_it(root: Path, file: str) -> None:
    if file != "data":
        (root / "step-2" / file).write_bytes(b"{}")
    beside, report = _verified(root / "step-2")
    assert not report.ok
    assert str(report.problems[0])
    assert beside() is None


@pytest.mark.parametrize("call", ["load", "steps", "retire", "verify"])
def test_an_error_that_is_handled_keeps_what_it_came_through(root: Path, call: str) -> None:
    """A run that failed goes on from a step that is whole, and tells of its failure later."""
    manager = checkpoint.Manager(root, keep=1)
    if call not in ("load", "verify"):
        (root / "step-2" / "manifest.json").write_bytes(b"{}")

    def fail() -> None:
        batch = 17
        raise RuntimeError(f"no number in batch {batch}")

    def look() -> None:
        calls: dict[str, Callable[[], object]] = {
            "load": manager.load,
            "steps": manager.steps,
            "retire": manager.retire,
            "verify": lambda: checkpoint.verify(root / "step-2"),
        }
        calls[call]()

    def recover() -> None:
        try:
            fail()
        except RuntimeError as error:
            look()
            trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert trace.tb_next.tb_frame.f_locals == {"batch": 17}

    with ThreadPoolExecutor(1) as threads:  # where no other thread does what is asked for
        threads.submit(recover).result()
    recover()
