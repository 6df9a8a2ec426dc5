"""Waiting for everything that an engine has, whoever holds the operations."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aio import AioError, Engine
from aio.operation import Ticket
from aio.process.threads import Latch
from tests.aio.conftest import Gate, random_bytes, run_python
from tests.support.interrupts import interrupt

KIB = 1 << 10
PATIENCE_SECONDS = 20.0


def test_drain_of_an_engine_with_nothing_pending_returns(engine: Engine) -> None:
    engine.drain()
    engine.drain()


def test_drain_waits_for_operations_that_nobody_holds(
    engine: Engine, make_file: Callable[..., Path]
) -> None:
    content = random_bytes(256 * KIB)
    path = make_file(0)
    with engine.open(path, "r+") as file:
        for start in range(0, content.size, 4096):
            engine.write(file, start, content[start : start + 4096])
        engine.drain()
        assert np.array_equal(np.fromfile(path, np.uint8), content)


def test_drain_waits_for_what_several_threads_have_pending(
    gate: Gate, gated: Engine, make_file: Callable[..., Path]
) -> None:
    content = random_bytes(16 * KIB)
    ended: list[bool] = []

    def drain() -> None:
        gated.drain()
        ended.append(watched.done())

    with gated.open(make_file(0), "r+") as file:
        starts = range(0, content.size, 4096)
        threads = [
            threading.Thread(target=gated.write, args=(file, at, content[at : at + 4096]))
            for at in starts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        watched = gated.read(file, 0, bytearray(1))
        drainers = [threading.Thread(target=drain) for _ in range(2)]
        for drainer in drainers:
            drainer.start()
        assert not ended  # nothing completes behind the gate
        gate.open()
        for drainer in drainers:
            drainer.join(PATIENCE_SECONDS)
        assert ended == [True, True]


def test_drain_leaves_what_comes_after_it_to_the_next(
    engine: Engine, make_file: Callable[..., Path]
) -> None:
    with engine.open(make_file(8192)) as file:
        first = engine.read(file, 0, bytearray(4096))
        engine.drain()
        assert first.done()
        second = engine.read(file, 4096, bytearray(4096))
        engine.drain()
        assert second.done()
        assert first.result() == second.result() == 4096


def test_interrupted_drain_waits_again_when_called_again(
    gate: Gate, gated: Engine, make_file: Callable[..., Path]
) -> None:
    with gated.open(make_file(4096)) as file:
        operation = gated.read(file, 0, bytearray(4096))
        for number in range(4):
            assert interrupt(gated.drain, number).line
        assert not operation.done()
        gate.open()
        gated.drain()
        assert operation.done()
        assert operation.result() == 4096


class Dropped(KeyboardInterrupt):
    """Comes between the count of a request and its way to C."""


def drained_beside(engine: Engine, monkeypatch: pytest.MonkeyPatch, drop: BaseException) -> Latch:
    """Is set when a drain ends that began while the next request was on its way to C; that request
    is dropped with ``drop``.
    """
    core, has_drained = engine._core, Latch()
    count, wait = core._count, Ticket.wait

    def drain() -> None:
        engine.drain()
        has_drained.set()

    def count_and_drop(entries: Any) -> None:
        count(entries)
        waits = Latch()

        def told(ticket: Ticket, timeout: float | None) -> bool:
            waits.set()
            return wait(ticket, timeout)

        monkeypatch.setattr(Ticket, "wait", told)
        threading.Thread(target=drain, daemon=True).start()
        assert waits.wait(PATIENCE_SECONDS)
        raise drop

    monkeypatch.setattr(core, "_count", count_and_drop)
    return has_drained


@pytest.mark.parametrize("drop", [Dropped(), MemoryError("no room for the requests")], ids=repr)
def test_drain_ends_where_a_request_that_it_waits_for_never_comes_to_the_kernel(
    engine: Engine,
    make_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    drop: BaseException,
) -> None:
    with engine.open(make_file(4096)) as file:
        has_drained = drained_beside(engine, monkeypatch, drop)
        with pytest.raises(type(drop)):
            engine.read(file, 0, bytearray(4096))
        assert has_drained.wait(PATIENCE_SECONDS / 4)


def test_drain_after_an_error_returns_and_leaves_the_error_to_its_operation(
    engine: Engine, make_file: Callable[..., Path]
) -> None:
    with engine.open(make_file(100)) as file:
        failing = engine.read(file, 0, bytearray(4096))
        engine.drain()
        assert failing.done()
        with pytest.raises(AioError):
            failing.result()
        engine.drain()


def test_drain_of_a_closed_engine_returns(engine: Engine, make_file: Callable[..., Path]) -> None:
    with engine.open(make_file(4096)) as file:
        operation = engine.read(file, 0, bytearray(4096))
        engine.close()
        engine.drain()
        assert operation.done()
        assert operation.result() == 4096


def test_drain_in_a_callback_is_refused(
    gate: Gate, gated: Engine, make_file: Callable[..., Path]
) -> None:
    refusals: list[str] = []
    told = threading.Event()

    def drain(_: object) -> None:
        try:
            gated.drain()
        except RuntimeError as error:
            refusals.append(str(error))
        told.set()

    with gated.open(make_file(4096)) as file:
        gated.read(file, 0, bytearray(4096)).add_done_callback(drain)
        gate.open()
        assert told.wait(PATIENCE_SECONDS)
        assert ["callback" in text for text in refusals] == [True]


def test_drain_in_a_forked_child_is_refused_with_both_processes(tmp_path: Path) -> None:
    script = """
        import os, sys
        from aio import Engine
        with Engine("posix") as engine:
            child = os.fork()
            if not child:
                try:
                    engine.drain()
                except RuntimeError as error:
                    print(f"process {os.getppid()} " in str(error), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
    """
    assert run_python(script, str(tmp_path)) == ["True"]


def test_submission_that_an_interrupt_cut_leaves_nothing_to_wait_for_ever(
    engine: Engine, make_file: Callable[..., Path]
) -> None:
    with engine.open(make_file(4096)) as file:

        def read() -> None:
            engine.read(file, 0, bytearray(4096))

        for number in range(interrupt(read, None).seen):
            interrupt(read, number)
            engine.drain()  # would not return
        assert file.path.stat().st_size == 4096
