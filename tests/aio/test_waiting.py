"""Waiting for operations, callbacks after them, and what is told of errors that nobody asks for."""

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aio import AioError, Engine, MemoryBackend, Operation, Request, files
from aio.process import threads
from tests.aio.conftest import Gate
from tests.support.interrupts import interrupt_at_call


class TestWaiting:
    def test_timeout_raises_and_leaves_the_operation_going(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(100)
        with gated.open(path) as file:
            operation = gated.read(file, 0, bytearray(100))
            for timeout in (0, 0.001, -1):
                with pytest.raises(TimeoutError) as caught:
                    operation.result(timeout)
                assert str(caught.value) == (
                    f"read of 100 bytes at offset 0 of {path} has not ended after {timeout} s"
                )
            assert not operation.done()
            with pytest.raises(RuntimeError, match="has not ended: ask for result"):
                _ = operation.finished_at
            gate.open()
            assert operation.result(1e300) == 100

    def test_an_abandoned_operation_is_waited_for_and_its_error_is_told_to_nobody(
        self, engine: Engine, make_file: Callable[..., Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        with engine.open(make_file(100)) as file:
            operation = engine.read(file, 0, bytearray(200))
            operation.abandon()
            assert operation.done()
            with pytest.raises(AioError):
                operation.result()
            other = engine.read(file, 0, bytearray(200))
            other.abandon()
            del other
        assert caplog.messages == []

    def test_many_threads_wait_for_one_operation(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        results: list[int] = []
        with gated.open(make_file(100)) as file:
            operation = gated.read(file, 0, bytearray(100))
            threads = [
                threading.Thread(target=lambda: results.append(operation.result()))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            gate.open()
            for thread in threads:
                thread.join(timeout=60)
        assert results == [100] * 8

    def test_waiting_for_another_operation_in_a_callback_raises(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        caught: list[BaseException] = []
        asked = threading.Event()
        never = os.eventfd(0)
        with (
            gated.open(make_file(100)) as file,
            Engine(MemoryBackend(gate=never)) as other,
            other.open(file.path) as other_file,
        ):
            pending = gated.read(file, 0, bytearray(1))

            def wait(_: Operation) -> None:
                # A new operation of this engine cannot end before this callback does.
                following = gated.read(file, 0, bytearray(100))
                try:
                    following.result()
                except RuntimeError as error:
                    caught.append(error)
                asked.set()

            pending.add_done_callback(wait)
            # Waiting there for another engine is slow but can end.
            foreign = other.read(other_file, 0, bytearray(1))
            pending.add_done_callback(lambda _: foreign.result())
            gate.open()
            assert asked.wait(timeout=60)
            os.eventfd_write(never, 1)
            assert foreign.result() == 1
        os.close(never)
        assert "would stop the thread that reaps completions" in str(caught[0])

    def test_callback_that_raises_is_logged_and_the_others_run(
        self,
        gated: Engine,
        gate: Gate,
        make_file: Callable[..., Path],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        ran = threading.Event()
        with gated.open(make_file(100)) as file:
            operation = gated.read(file, 0, bytearray(100))
            operation.add_done_callback(lambda _: 1 / 0)
            operation.add_done_callback(lambda _: sys.exit())
            operation.add_done_callback(lambda _: ran.set())
            gate.open()
            assert ran.wait(timeout=60)
            assert operation.result() == 100
            assert gated.read(file, 0, bytearray(100)).result() == 100
        assert len(caplog.records) == 2
        for record in caplog.records:
            assert "a callback of the read of 100 bytes at offset 0" in record.getMessage()

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_interrupt_in_a_callback_on_the_main_thread_is_raised(
        self,
        kind: type[BaseException],
        engine: Engine,
        make_file: Callable[..., Path],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def interrupted(_: Operation) -> None:
            raise kind

        with engine.open(make_file(100)) as file:
            operation = engine.read(file, 0, bytearray(100))
            operation.result()
            while engine._core._in_flight:  # or the reaper thread may still come first
                pass
            with pytest.raises(kind):
                operation.add_done_callback(interrupted)
            operation.add_done_callback(lambda _: 1 / 0)
        assert len(caplog.records) == 1

    def test_error_that_nobody_asks_for_is_logged_once_a_file(
        self,
        engine: Engine,
        make_file: Callable[..., Path],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with engine.open(make_file(100)) as file:
            engine.submit([Request("read", file, 200, bytearray(100))] * 5)
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert record.getMessage() == (
            "nobody asked for the result of an operation that failed: cannot read 100 bytes at"
            f" offset 200 of {file.path}: end of file"
        )

    def test_interrupt_of_a_file_that_waits_to_be_closed_comes_out_as_it_is(
        self, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(100)
        where = (threading.__file__, files.__file__, threads.__file__)
        for number in itertools.count():
            gate = Gate()
            with Engine(gate.backend()) as engine, engine.open(path) as file:
                engine.read(file, 0, bytearray(100))
                timer = threading.Timer(0.02, gate.open)
                timer.start()
                lines = interrupt_at_call(file.close, number, where)
                timer.join()
                file.close()
            gate.close()
            if lines.error is None:  # there are no more
                break
        assert number > 5

    def test_interrupt_ends_the_wait_and_not_the_operation(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        # A shell starts what it runs in the background with this signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with gated.open(make_file(100)) as file, contextlib.ExitStack() as undo:
            undo.callback(signal.signal, signal.SIGINT, before)
            operation = gated.read(file, 0, bytearray(100))
            main = threading.get_ident()
            interrupter = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT))

            def wait() -> None:
                interrupter.start()
                operation.result(60)

            with pytest.raises(KeyboardInterrupt):
                wait()
            assert not operation.done()
            gate.open()
            assert operation.result() == 100
