"""There is no memory for a moment, wherever that is: every request ends still."""

import pytest

from tests.aio.conftest import run_python

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
