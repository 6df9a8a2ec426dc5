"""Faults of system calls, made by strace, and a libaio.so.1 made for the occasion."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.aio.conftest import run_python, skip_unless_available


def _why_no_strace() -> str | None:
    if shutil.which("strace") is None:
        return "needs strace"
    tried = subprocess.run(
        ["strace", "-e", "inject=getuid:error=EPERM", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else "needs the right to trace processes"


_no_strace = _why_no_strace()
needs_strace = pytest.mark.skipif(_no_strace is not None, reason=str(_no_strace))

# Writes and reads back with unaligned edges; prints whether the bytes survived, or the error.
_ROUND_TRIP = """
    import logging, sys
    from aio import AioError, Engine

    path, backend = sys.argv[1:]
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
    content = bytes(range(256)) * 4096
    back = bytearray(len(content))
    try:
        with Engine(backend, queue_depth=4, block_bytes=1 << 16) as engine:
            print(engine.describe().backend)
            with engine.open(path, "w") as file:
                engine.write(file, 100, content).result()
                engine.read(file, 100, back).result()
                print(back == content, file.size())
                file.sync()
    except AioError as error:
        print(error.errno, error)
"""


# Under strace, so that the signal comes within the call.
_INTERRUPTED = """
    import signal, sys
    from aio import Engine

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Engine("posix") as engine:
        try:
            engine.open(sys.argv[1], "w", size=1 << 20)
        except KeyboardInterrupt:
            print("interrupted")
"""

_EVENTFD = "anon_inode:[eventfd]"

_OPENED = """
    import sys
    from aio import Engine

    with Engine("posix") as engine:
        try:
            engine.open(sys.argv[1], "w")
        except OSError as error:
            print(error.errno, error.filename)
"""


def _round_trip(path: Path, backend: str, *faults: str, only: str | None = None) -> list[str]:
    """`only`: of calls on descriptors of this alone."""
    strace = ["strace", "-f", "-q", "-o", str(path.with_name("trace"))]
    strace += [] if only is None else ["-P", only]
    for fault in faults:
        strace += ["-e", f"inject={fault}"]
    return run_python(_ROUND_TRIP, str(path), backend, under=strace)


@needs_strace
class TestPassingFaults:
    @pytest.mark.parametrize(
        ("backend", "fault"),
        [
            ("libaio", "io_submit:error=EAGAIN:when=1..3"),
            ("libaio", "io_submit:error=EINTR:when=1..3"),
            ("libaio", "io_submit:error=EINTR:when=2..5"),
            ("libaio", "io_getevents:error=EINTR:when=1+2"),
            ("libaio", "io_getevents:error=EAGAIN:when=1+2"),
            ("io_uring", "io_uring_enter:error=EAGAIN:when=1..3"),
            ("io_uring", "io_uring_enter:error=EBUSY:when=1..3"),
            ("io_uring", "io_uring_enter:error=EBUSY:when=4..6"),
            ("io_uring", "io_uring_enter:error=EINTR:when=1+3"),
            ("io_uring", "io_uring_enter:error=EAGAIN:when=1+2"),
            ("posix", "pwrite64:error=EAGAIN:when=1..3"),
            ("posix", "pwrite64:error=EINTR:when=1+4"),
            ("libaio", "fallocate:error=EINTR:when=1..2"),
            ("libaio", "pwrite64:error=EINTR:when=1+2"),
        ],
    )
    def test_fault_that_passes_is_not_noticed(
        self, backend: str, fault: str, tmp_path: Path
    ) -> None:
        skip_unless_available(backend)  # type: ignore[arg-type]
        lines = _round_trip(tmp_path / "data", backend, fault)
        assert lines == [backend, f"True {100 + (1 << 20)}"]
        assert "(INJECTED)" in (tmp_path / "trace").read_text()


@needs_strace
class TestLastingFaults:
    def test_file_system_without_fallocate_grows_files_by_writing(
        self, real_backend: str, tmp_path: Path
    ) -> None:
        lines = _round_trip(tmp_path / "data", real_backend, "fallocate:error=EOPNOTSUPP")
        assert lines == [real_backend, f"True {100 + (1 << 20)}"]
        assert (tmp_path / "trace").read_text().count("fallocate(") == 1  # asked once, then known

    def test_disk_that_is_full_is_met_before_the_first_byte(
        self, real_backend: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "data"
        name, failure = _round_trip(path, real_backend, "fallocate:error=ENOSPC")
        assert name == real_backend
        assert failure == (
            f"{errno.ENOSPC} cannot write 1048576 bytes at offset 100 of {path}:"
            " No space left on device"
        )
        assert path.stat().st_size == 0

    def test_failed_sync_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        assert _round_trip(path, "posix", "fsync:error=EIO")[-1] == (
            f"{errno.EIO} cannot sync {path}: Input/output error; what was written to it may be"
            " lost, write it again to another file"
        )

    def test_interrupt_of_an_allocation_ends_it(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        trace = tmp_path / "trace"
        fault = "inject=fallocate:error=EINTR:signal=SIGINT:when=1"
        strace = ["strace", "-f", "-q", "-o", str(trace), "-e", "trace=fallocate", "-e", fault]
        assert run_python(_INTERRUPTED, str(path), under=strace) == ["interrupted"]
        assert trace.read_text().count("fallocate(") == 1
        assert not path.exists()

    @pytest.mark.parametrize("code", ["EMFILE", "ENOMEM", "EIO"])
    def test_alignment_that_cannot_be_asked_for_is_an_error(
        self, code: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "data"
        trace = f"inject=statx:error={code}"
        strace = ["strace", "-f", "-q", "-o", str(tmp_path / "trace"), "-e", trace]
        (line,) = run_python(_OPENED, str(path), under=strace)
        assert line == f"{getattr(errno, code)} {path}"
        assert not path.exists()

    @pytest.mark.parametrize(
        ("backend", "fault"),
        [
            ("libaio", "io_submit:error=EBADF:when=1"),
            ("io_uring", "io_uring_enter:error=EBADF:when=1"),
            ("posix", "pwrite64:error=EBADF:when=1"),
        ],
    )
    def test_error_of_a_submission_is_the_error_of_its_operation(
        self, backend: str, fault: str, tmp_path: Path
    ) -> None:
        skip_unless_available(backend)  # type: ignore[arg-type]
        path = tmp_path / "data"
        assert _round_trip(path, backend, fault)[1].startswith(
            f"{errno.EBADF} cannot write 1048576 bytes at offset 100 of {path}: Bad file descriptor"
        )

    def test_lane_that_cannot_be_woken_is_the_error_of_the_operation(
        self, real_backend: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "data"
        lines = _round_trip(path, real_backend, "write:error=EIO", only=_EVENTFD)
        assert lines == [
            real_backend,
            f"{errno.EIO} cannot write 1048576 bytes at offset 100 of {path}: Input/output error",
        ]

    def test_wake_that_cannot_be_read_costs_no_byte(
        self, real_backend: str, tmp_path: Path
    ) -> None:
        lines = _round_trip(tmp_path / "data", real_backend, "read:error=EIO", only=_EVENTFD)
        assert lines == [real_backend, f"True {100 + (1 << 20)}"]
        assert "(INJECTED)" in (tmp_path / "trace").read_text()

    def test_kernel_that_forbids_io_uring_gets_the_next_best(self, tmp_path: Path) -> None:
        skip_unless_available("libaio")
        lines = _round_trip(tmp_path / "data", "auto", "io_uring_setup:error=EPERM")
        assert lines == ["libaio", f"True {100 + (1 << 20)}"]

    def test_kernel_with_neither_queue_gets_threads_and_a_warning(self, tmp_path: Path) -> None:
        lines = _round_trip(
            tmp_path / "data", "auto", "io_uring_setup:error=ENOSYS", "io_setup:error=ENOSYS"
        )
        assert lines == [
            "WARNING no kernel queue for I/O (libaio: Function not implemented: this kernel or"
            " container does not allow it), so each block takes a thread of its own, which costs"
            " processor time and some of the device's speed",
            "posix",
            f"True {100 + (1 << 20)}",
        ]

    def test_kernel_without_statx_is_tried_with_direct_io_all_the_same(
        self, real_backend: str, tmp_path: Path
    ) -> None:
        lines = _round_trip(tmp_path / "data", real_backend, "statx:error=ENOSYS")
        assert lines[0] == real_backend
        assert lines[-1] == f"True {100 + (1 << 20)}"


_LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#define CALL(...) long result = syscall(__VA_ARGS__); return result < 0 ? -errno : (int)result
int io_setup(int n, void *context) {
    puts("library");
    fflush(stdout);
    CALL(SYS_io_setup, n, context);
}
int io_destroy(void *context) { CALL(SYS_io_destroy, context); }
int io_submit(void *context, long n, void *blocks) { CALL(SYS_io_submit, context, n, blocks); }
"""
_GETEVENTS = """
int io_getevents(void *context, long min, long max, void *events, void *timeout) {
    CALL(SYS_io_getevents, context, min, max, events, timeout);
}
"""


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a call is missing"])
def test_libaio_is_used_where_it_is_installed_and_whole(whole: bool, tmp_path: Path) -> None:
    skip_unless_available("libaio")
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    for name in ("libaio.so.1", "libaio.so.1t64"):
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)],
            input=_LIBRARY + _GETEVENTS * whole,
            text=True,
            check=True,
        )
    lines = run_python(_ROUND_TRIP, str(tmp_path / "data"), "libaio", LD_LIBRARY_PATH=str(tmp_path))
    assert lines == ["library"] * whole + ["libaio", f"True {100 + (1 << 20)}"]
