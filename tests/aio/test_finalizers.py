"""What is let go of ends without a line of Python, in which an interrupt would be swallowed."""

import gc
import logging
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from aio import Engine, Slab, SlabFullError
from aio.process.descriptors import Descriptor
from tests.aio.conftest import ROOT, open_descriptors, run_python
from tests.support.interrupts import Lines, interrupt, interrupt_behind_call

PAGE = resource.getpagesize()


def _dropped_array() -> object:
    return Slab(PAGE).allocate(1)


def _dropped_slab() -> object:
    return Slab(PAGE)


def _dropped_descriptor() -> object:
    return Descriptor("/", os.O_RDONLY)


def _dropped_engine() -> object:
    return Engine("posix")


def _closed_engine() -> object:
    engine = Engine("posix")
    engine.close()
    return engine


def _closed_file() -> object:
    with Engine("posix") as engine, engine.open("/proc/self/exe") as file:
        return file


def _dropped_file() -> object:
    with Engine("posix") as engine:
        return engine.open("/proc/self/exe")


def _failed_operation() -> object:
    with Engine("posix") as engine, engine.open("/proc/self/exe") as file:
        return engine.read(file, 1 << 60, bytearray(1))


DROPPED = [
    _dropped_array,
    _dropped_slab,
    _dropped_descriptor,
    _dropped_engine,
    _closed_engine,
    _closed_file,
    _dropped_file,
    _failed_operation,
]


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
@pytest.mark.parametrize("make", DROPPED, ids=lambda make: make.__name__)
def test_thing_that_is_let_go_of_runs_no_python_of_ours(make: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        # As outside of tests: the filters of these are patterns, which are Python themselves.
        warnings.simplefilter("ignore", ResourceWarning)
        before = open_descriptors()
        held = [make()]
        ran: list[str] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT / 'aio'}/"):
                ran.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

        sys.setprofile(note)
        try:
            held.clear()
        finally:
            sys.setprofile(None)
    assert ran == []
    if make is not _dropped_engine:  # which ends in the background
        assert open_descriptors() <= before


class TestUnasked:
    def test_error_of_an_operation_that_is_kept_until_the_end_is_logged_then(
        self, tmp_path: Path
    ) -> None:
        script = """
            import logging, sys
            from aio import Engine

            logging.basicConfig(format="%(name)s %(message)s", stream=sys.stdout)
            engine = Engine("posix")
            file = engine.open(sys.argv[1], "w")
            kept = engine.read(file, 0, bytearray(1))
        """
        path = tmp_path / "data"
        assert run_python(script, str(path)) == [
            "aio.process.unasked nobody asked for the result of an operation that failed: cannot"
            f" read 1 bytes at offset 0 of {path}: end of file"
        ]

    def test_forked_child_does_not_tell_of_its_parents_errors(self, tmp_path: Path) -> None:
        script = """
            import logging, os, sys
            from aio import AioError, Engine

            logging.basicConfig(stream=sys.stdout)
            with Engine("posix") as engine, engine.open(sys.argv[1], "w") as file:
                kept = engine.read(file, 0, bytearray(1))
            if os.fork() == 0:
                sys.exit()
            os.wait()
            try:
                kept.result()
            except AioError:
                print("asked")
        """
        assert run_python(script, str(tmp_path / "data")) == ["asked"]

    def test_error_that_was_asked_for_is_not_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Engine("posix") as engine, engine.open(tmp_path / "data", "w") as file:
            asked, ignored = (engine.read(file, 0, bytearray(1)) for _ in range(2))
            with pytest.raises(OSError, match="end of file"):
                asked.result()
            del asked, ignored
        assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


class TestSlab:
    @pytest.mark.parametrize("how", [interrupt, interrupt_behind_call])
    def test_interrupt_at_any_line_or_call_loses_no_range(
        self, how: Callable[[Callable[[], object], int | None], Lines]
    ) -> None:
        slab = Slab(8 * PAGE)
        kept = slab.allocate(PAGE)

        def use() -> None:
            first = slab.allocate(3 * PAGE)
            second = slab.allocate(PAGE)
            del first
            with pytest.raises(SlabFullError):
                slab.allocate(8 * PAGE)
            slab.wait_for_release(0.0)
            del second
            slab.wait_for_release(10.0)
            assert slab.used_bytes == PAGE

        total = how(use, None).seen
        assert total > 20
        for number in range(total):
            place = how(use, number).line
            assert (slab.used_bytes, slab.largest_free_bytes) == (PAGE, 7 * PAGE), place
        del kept
        gc.collect()
        assert slab.largest_free_bytes == 8 * PAGE

    def test_waiter_hears_of_a_range_that_was_handed_out_after_it_began(self) -> None:
        slab = Slab(2 * PAGE)
        kept = slab.allocate(PAGE)
        heard: list[bool] = []
        waiting = threading.Thread(target=lambda: heard.append(slab.wait_for_release(20)))
        waiting.start()
        while not slab._waiters:
            pass
        slab.allocate(PAGE)
        waiting.join(20)
        assert heard == [True]
        assert slab.used_bytes == PAGE
        del kept

    def test_mapping_of_the_parent_alone_is_not_unmapped_by_a_child(self) -> None:
        script = """
            import ctypes, mmap, os
            from aio import Slab

            slab = Slab(1 << 22, inherited=False)
            mmap_at = ctypes.CDLL(None, use_errno=True).mmap
            mmap_at.restype = ctypes.c_void_p
            integers = [ctypes.c_int] * 3
            mmap_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *integers, ctypes.c_long]
            child = os.fork()
            if child == 0:
                MAP_FIXED_NOREPLACE = 0x100000
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
                at = mmap_at(slab.address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
                assert at == slab.address
                del slab
                ctypes.memset(at, 7, 4096)  # ends the child if nothing is there
                os._exit(0)
            print(os.waitpid(child, 0)[1])
        """
        assert run_python(script) == ["0"]
