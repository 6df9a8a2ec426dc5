"""There is no memory for a moment, wherever that is: every request ends still."""

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from aio import Slab
from tests.aio.conftest import run_python

# Hands over requests with the nth allocation failing, and so many behind it.
_SUBMIT = """
    import _testcapi
    import os
    import sys
    from aio import Engine, Request

    data = bytearray(10)
    with Engine("posix") as engine, engine.open(sys.argv[1], "w") as file:
        for first in range(120):
            is_refused = False
            file.truncate(0)
            try:
                _testcapi.set_nomemory(first, first + int(sys.argv[2]))
                engine.submit([Request("write", file, 0, data), Request("write", file, 10, data)])
            except MemoryError:
                is_refused = True
            finally:
                _testcapi.remove_mem_hooks()
            engine.drain()
            if is_refused and file.size():
                print("refused and written", first, flush=True)
            if file.in_flight:
                print("waited for without end", first, flush=True)
                os._exit(0)
"""
_SCRIPT = """
    import _testcapi
    import os
    import sys
    from aio import AioError, Engine, MemoryBackend, _core

    length = int(sys.argv[1])
    begins = []

    class Library:  # the reaper's next allocations fail, from the nth on
        def __getattr__(self, name):
            return getattr(real, name)

        def aio_engine_reap(self, *arguments):
            count = real.aio_engine_reap(*arguments)
            if count and begins:
                first = begins.pop()
                _testcapi.set_nomemory(first, first + length)
            return count

    def ended(operation):
        while True:
            try:
                return operation.result(timeout=10)
            except AioError:
                return 0
            except MemoryError:  # this thread's turn
                _testcapi.remove_mem_hooks()

    real, _core.lib = _core.lib, Library()
    gate = os.eventfd(0)
    with Engine(MemoryBackend(gate=gate)) as engine, engine.open(sys.argv[2], "w") as file:
        ends = 0
        for first in range(40):
            for offset in (0, 1 << 40):
                kind = engine.read if offset else engine.write
                data = bytearray(10)
                operation = kind(file, offset, data)
                begins[:] = [first]
                os.eventfd_write(gate, 1)
                try:
                    moved = ended(operation)
                except TimeoutError:
                    print("lost", kind.__name__, first, flush=True)
                    os._exit(0)
                _testcapi.remove_mem_hooks()
                assert moved == (0 if offset else 10)
                os.eventfd_read(gate)
                ends += 1
                engine.drain()
                data.append(0)  # which is refused while the engine has it
        assert len(file.in_flight) == 0
    print(ends)
"""


@pytest.mark.parametrize("length", [1, 5])
def test_a_request_ends_wherever_there_is_no_memory_to_tell_of_it(
    length: int, tmp_path: object
) -> None:
    pytest.importorskip("_testcapi")
    lines = run_python(_SCRIPT, str(length), f"{tmp_path}/file")
    assert lines[-1:] == ["80"], lines


@pytest.mark.parametrize("length", [1, 6, 3000])
def test_nothing_is_written_or_waited_for_of_requests_that_there_was_no_memory_for(
    length: int, tmp_path: object
) -> None:
    pytest.importorskip("_testcapi")
    assert run_python(_SUBMIT, f"{tmp_path}/file", str(length)) == []


class _Lost(SimpleQueue[Any]):
    """Whoever puts something in finds no memory to."""

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        pass


def test_a_range_comes_back_whose_end_there_was_no_memory_to_tell_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Slab(1 << 20) as slab:
        slab._ended = _Lost()
        for _ in range(3):
            held = [slab.allocate(1 << 20)]
            slab.wait_for_release(0)  # of the one before
            assert not slab.wait_for_release(0.01)
            del held[:]
        held = [slab.allocate(1 << 20)]
        slab.wait_for_release(0)
        thread = threading.Timer(0.05, held.clear)
        thread.start()
        monkeypatch.setattr("aio.buffers._Waiter.watch", lambda *_: None)
        assert slab.wait_for_release(60)
        thread.join()
