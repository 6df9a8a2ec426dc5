"""What happens to buffers, operations and threads when somebody lets go at the wrong moment."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aio import AioError, Engine, File, MemoryBackend, Operation, Request
from tests.aio.conftest import Gate, open_descriptors, random_bytes, run_python

MIB = 1 << 20


class Tracked(np.ndarray):
    """An array that can be watched dying."""


def tracked(nbytes: int) -> Tracked:
    return np.zeros(nbytes, np.uint8).view(Tracked)


class TestBuffers:
    def test_buffer_lives_until_its_completion_and_no_longer(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        content = random_bytes(MIB)
        path = make_file(0)
        with gated.open(path, "r+") as file:
            buffer = content.view(Tracked)
            del content
            alive = weakref.ref(buffer)
            gated.write(file, 0, buffer)  # the operation is dropped at once
            del buffer
            gc.collect()
            assert alive() is not None
            gate.open()
        assert alive() is None
        assert path.read_bytes() == random_bytes(MIB).tobytes()

    def test_finished_operation_does_not_keep_its_ticket_in_the_engine(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        with engine.open(make_file(4096)) as file:
            buffer = tracked(4096)
            alive = weakref.ref(buffer)
            operation = engine.read(file, 0, buffer)
            operation.result()
            del buffer
            assert alive() is not None  # the request refers to it
            del operation
            assert alive() is None

    @pytest.mark.parametrize("way", ["result", "abandon"])
    def test_failed_operation_that_is_dropped_gives_its_buffer_back_without_the_collector(
        self, engine: Engine, make_file: Callable[..., Path], way: str
    ) -> None:
        gc.disable()
        try:
            with engine.open(make_file(100)) as file:
                buffer = tracked(4096)
                alive = weakref.ref(buffer)
                operation = engine.read(file, 0, buffer)
                with suppress(AioError):
                    getattr(operation, way)()
                assert operation.done()
                del operation, buffer
            assert alive() is None
        finally:
            gc.enable()

    def test_buffer_in_flight_cannot_be_resized(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        with gated.open(make_file(100)) as file:
            buffer = bytearray(100)
            operation = gated.read(file, 0, buffer)
            with pytest.raises(BufferError):
                buffer.clear()
            gate.open()
            operation.result()
            buffer.clear()

    @pytest.mark.parametrize(
        "buffer",
        [b"constant", memoryview(b"constant"), np.zeros((4, 4))[:, ::2], "text", None, 7],
        ids=["bytes", "read-only view", "strided", "str", "None", "int"],
    )
    def test_buffer_that_cannot_be_read_into_is_refused_before_anything_is_queued(
        self, engine: Engine, make_file: Callable[..., Path], buffer: bytes
    ) -> None:
        good = bytearray(100)
        with engine.open(make_file(100)) as file:
            requests = [Request("read", file, 0, good), Request("read", file, 0, buffer)]
            with pytest.raises(TypeError, match="must be writable and C-contiguous"):
                engine.submit(requests)
        assert good == bytes(100)
        good.clear()  # nothing holds it


class TestRefusals:
    def test_bad_lane_offset_or_kind_is_refused(
        self, engine: Engine, make_file: Callable[..., Path]
    ) -> None:
        with engine.open(make_file(100)) as file:
            for lane in (-1, engine.lanes):
                with pytest.raises(ValueError, match=f"lane={lane} is not between 0 and 1"):
                    engine.read(file, 0, bytearray(1), lane=lane)
            for offset in (-1, (1 << 63) - 1):
                with pytest.raises(ValueError, match=f"at offset {offset} of .*data.bin"):
                    engine.read(file, offset, bytearray(1))
            with pytest.raises(TypeError):
                engine.read(file, 1.5, bytearray(1))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="a request is a"):
                engine.submit([Request("sync", file, 0, bytearray(1))])  # type: ignore[arg-type]

    def test_closed_engine_refuses_and_closes_again(
        self, backend: MemoryBackend, make_file: Callable[..., Path]
    ) -> None:
        engine = Engine(backend)
        file = engine.open(make_file(100))
        engine.close()
        engine.close()
        with pytest.raises(ValueError, match="the engine is closed"):
            engine.read(file, 0, bytearray(1))
        with pytest.raises(ValueError, match="the engine is closed"):
            engine.open(file.path)
        assert file.size() == 100  # a file outlives its engine
        file.close()


class TestClose:
    def test_close_finishes_everything_that_was_submitted(
        self, backend: MemoryBackend, tmp_path: Path
    ) -> None:
        content = random_bytes(4 * MIB)
        engine = Engine(backend, queue_depth=2, block_bytes=1 << 16)
        file = engine.open(tmp_path / "data", "w")
        operations = engine.submit(
            [Request("write", file, i, content[i : i + 50_000]) for i in range(0, 4 * MIB, 50_000)]
        )
        engine.close()
        assert all(operation.done() for operation in operations)
        assert sum(operation.result() for operation in operations) == len(content)
        file.close()
        assert (tmp_path / "data").read_bytes() == content.tobytes()

    def test_close_frees_descriptors_and_threads(
        self, backend: MemoryBackend, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(MIB)
        before = open_descriptors(), _native_threads()
        for _ in range(3):
            with Engine(backend, lanes=3) as engine, engine.open(path, "r+") as file:
                buffer = bytearray(MIB - 1)
                for lane in range(3):
                    engine.read(file, 1, buffer, lane=lane).result()
        assert (open_descriptors(), _native_threads()) == before

    def test_engine_that_is_dropped_finishes_in_the_background(
        self, gate: Gate, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(0)
        engine = Engine(gate.backend())
        file = engine.open(path, "r+")
        operation = engine.write(file, 0, b"late")
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None
        gate.open()
        assert operation.result() == 4
        file.close()
        assert path.read_bytes() == b"late"

    def test_close_in_a_callback_does_not_deadlock(self, make_file: Callable[..., Path]) -> None:
        engine = Engine("posix")
        with engine.open(make_file(100)) as file:
            closed = threading.Event()

            def close(_: Operation) -> None:
                engine.close()
                closed.set()

            engine.read(file, 0, bytearray(100)).add_done_callback(close)
            assert closed.wait(timeout=60)
            with pytest.raises(ValueError, match="the engine is closed"):
                engine.read(file, 0, bytearray(1))
            engine.close()

    def test_submitters_that_wait_for_room_are_let_go_by_close(
        self, gate: Gate, make_file: Callable[..., Path]
    ) -> None:
        engine = Engine(gate.backend(), max_pending_bytes=10)
        file = engine.open(make_file(100))
        first = engine.read(file, 0, bytearray(10))
        results: list[object] = []
        about_to = threading.Event()

        def submit() -> None:
            about_to.set()
            try:
                results.append(engine.read(file, 0, bytearray(10)).result())
            except (OSError, ValueError) as error:
                results.append(error)

        thread = threading.Thread(target=submit)
        thread.start()
        about_to.wait()
        closing = threading.Thread(target=engine.close)
        closing.start()
        gate.open()
        thread.join(timeout=60)
        closing.join(timeout=60)
        assert not thread.is_alive()
        assert not closing.is_alive()
        assert first.result() == 10
        # It got in before the end, or it was refused; it is not left waiting.
        (result,) = results
        assert result == 10 or "closed" in str(result) or "canceled" in str(result)
        file.close()


_FORK = """
    import os, sys
    from aio import AioError, Engine, MemoryBackend

    path = sys.argv[1]
    gate = os.eventfd(0)
    engine = Engine(MemoryBackend(gate=gate))
    file = engine.open(path, "r+")
    pending = engine.write(file, 0, b"parent")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        lines = []
        for use in (
            lambda: engine.write(file, 0, b"child"),
            lambda: engine.open(path),
            pending.result,
        ):
            try:
                use()
            except RuntimeError as error:
                lines.append(str(error).replace(str(os.getpid()), "CHILD"))
        engine.close()
        file.close()
        with Engine("posix") as own, own.open(path) as again:  # its own engine works
            lines.append(str(own.read(again, 0, bytearray(3)).result()))
        os.write(write_end, "\\n".join(lines).encode())
        sys.exit()  # with atexit handlers and finalizers, as a careless child does
    _, status = os.waitpid(child, 0)
    print(os.read(read_end, 10_000).decode().replace(str(os.getpid()), "PARENT"))
    print(status)
    os.eventfd_write(gate, 1)
    print(pending.result())
    file.close()
    engine.close()
"""


def test_use_after_fork_is_refused_with_both_pids_and_the_parent_goes_on(
    make_file: Callable[..., Path],
) -> None:
    path = make_file(100)
    assert run_python(_FORK, str(path)) == [
        "an engine of process PARENT cannot be used in process CHILD, which was forked from it:"
        " make an engine in each process",
        "an engine of process PARENT cannot be used in process CHILD, which was forked from it:"
        " make an engine in each process",
        f"write of 6 bytes at offset 0 of {path} was submitted in process PARENT and cannot end in"
        " process CHILD, which was forked from it",
        "3",
        "0",
        "6",
    ]
    assert path.read_bytes()[:6] == b"parent"


_EXIT = """
    import sys
    from aio import Engine

    path, backend = sys.argv[1:]
    engine = Engine(backend, queue_depth=4, block_bytes=1 << 16)
    file = engine.open(path, "w")
    operations = [engine.write(file, i * 1_000_001, bytes([i]) * 1_000_001) for i in range(20)]
    operations[0].add_done_callback(lambda _: print("called"))
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "del engine", "del engine, file"])
def test_interpreter_exit_with_operations_in_flight_writes_them_all(
    real_backend: str, end: str, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    script = _EXIT.replace("{end}", end)
    assert run_python(script, str(path), real_backend) == ["called"]
    expected = b"".join(bytes([i]) * 1_000_001 for i in range(20))
    assert path.read_bytes() == expected


def test_file_that_is_closed_where_the_lock_of_the_engine_is_held_is_closed(
    gate: Gate, gated: Engine, tmp_path: Path
) -> None:
    file = gated.open(tmp_path / "data", "w")
    operations = [gated.write(file, i * 100, bytes(100)) for i in range(3)]
    timer = threading.Timer(0.02, gate.open)
    closer = threading.Thread(target=lambda: _close_as_finalizer(gated, file), daemon=True)
    timer.start()
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    assert [operation.result() for operation in operations] == [100] * 3
    timer.join()


def _close_as_finalizer(engine: Engine, file: File) -> None:
    with engine._core.lock:  # a finalizer may run within
        file.close()


_LATE_EXIT = """
    import atexit
    import sys

    @atexit.register
    def write():  # runs when aio has closed every engine that there is
        engine = Engine("posix", queue_depth=4, block_bytes=1 << 16)
        file = engine.open(sys.argv[1], "w")
        for i in range(20):
            operation = engine.write(file, i * 1_000_001, bytes([i]) * 1_000_001)
        print(operation.done())

    from aio import Engine
"""


def test_what_is_submitted_when_engines_are_closed_already_is_written(tmp_path: Path) -> None:
    path = tmp_path / "data"
    assert run_python(_LATE_EXIT, str(path)) == ["True"]
    assert path.read_bytes() == b"".join(bytes([i]) * 1_000_001 for i in range(20))


def _native_threads() -> int:
    """Threads of the C engine in this process."""
    names = [
        Path(f"/proc/self/task/{task.name}/comm") for task in Path("/proc/self/task").iterdir()
    ]
    return sum(name.read_text().startswith("aio-") for name in names if name.exists())
