"""A machine without memory, and calls that signals interrupt."""

import _thread
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aio import AioError, Engine, Slab, _native
from tests.aio.conftest import ROOT, Replaced, open_descriptors, run_python

# Of the memory for requests there is so much, and no more.
_NO_MEMORY = """
#include "engine.h"
extern void *__libc_calloc(size_t, size_t);
int requests_left = -1;
void *calloc(size_t count, size_t nbytes) {
    if (count == 1 && nbytes == sizeof(struct job) && requests_left >= 0 && !requests_left--) {
        requests_left = 0;
        return 0;
    }
    return __libc_calloc(count, nbytes);
}
"""
_BATCH = """
    import ctypes, sys
    from aio import Engine, Request

    left = ctypes.c_int.in_dll(ctypes.CDLL(None), "requests_left")
    buffers = [bytearray(b"x" * 100) for _ in range(5)]
    with Engine("posix") as engine, engine.open(sys.argv[1], "w") as file:
        batch = [Request("write", file, i * 100, buffer) for i, buffer in enumerate(buffers)]
        left.value = 3
        try:
            engine.submit(batch)
        except MemoryError as error:
            print(error)
        left.value = -1
        print(file.size())
        for buffer in buffers:
            buffer.append(0)  # nothing holds it
        print(engine.write(file, 0, b"after").result())
"""


# A disk that is full half way; then somebody who writes gets his chance.
_HALF = """
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
int fallocate(int fd, int mode, off_t offset, off_t length) {
    char last = 0;
    if (length < 1 << 26)
        return (int)syscall(SYS_fallocate, fd, mode, offset, length);
    syscall(SYS_fallocate, fd, mode, offset, 1 << 20);
    for (int i = 0; i < 300 && last != 'x'; i++) {
        usleep(1000);
        (void)!pread(fd, &last, 1, (2 << 20) - 1);
    }
    errno = ENOSPC;
    return -1;
}
int fallocate64(int fd, int mode, off_t offset, off_t length) {
    return fallocate(fd, mode, offset, length);
}
"""
_TWO_FILES = """
    import sys, threading
    from aio import AioError, Engine

    def reserve(file):
        try:
            file.allocate(0, 64 << 20)
        except AioError as error:
            print(error.strerror)

    with Engine("posix") as engine, Engine("posix") as other:
        with engine.open(sys.argv[1], "w") as file, other.open(sys.argv[1], "r+") as again:
            thread = threading.Thread(target=reserve, args=(again,))
            thread.start()
            while not file.size():
                pass
            engine.write(file, 1 << 20, b"x" * (1 << 20)).result()
            thread.join()
            print(file.size())
"""


_BACKENDS = """
    import sys
    from aio import AioError, Engine

    with Engine() as engine, engine.open(sys.argv[1], "w") as file:
        engine.write(file, 0, b"0123456789" * 10_000).result()
        print(engine.read(file, 0, bytearray(10)).result())
"""


def _library(folder: Path, source: str) -> Path:
    """What takes the place of functions of the C library where it is preloaded."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("needs functions of its own in the C library's place")
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "preloaded.so"
    flags = ["-D_GNU_SOURCE", "-shared", "-fPIC", "-I", str(ROOT / "aio" / "csrc")]
    built = subprocess.run(
        [compiler, *flags, "-x", "c", "-", "-o", str(library)],
        input=source,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip("needs a C library whose functions can be replaced")
    return library


def test_failed_allocation_keeps_what_was_written_through_another_file_meanwhile(
    tmp_path: Path,
) -> None:
    library = _library(tmp_path, _HALF)
    lines = run_python(_TWO_FILES, str(tmp_path / "data"), LD_PRELOAD=str(library))
    assert lines == ["No space left on device", str(2 << 20)]


def test_batch_that_there_is_no_memory_for_is_queued_not_even_in_part(tmp_path: Path) -> None:
    library = _library(tmp_path, _NO_MEMORY)
    assert run_python(_BATCH, str(tmp_path / "data"), LD_PRELOAD=str(library)) == [
        "cannot queue 5 requests: there is no memory",
        "0",
        "5",
    ]


def test_allocation_that_signals_interrupt_goes_on_and_in_the_end_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hindered: list[bool] = []

    def allocate(native: object, offset: int, nbytes: int, unhindered: int) -> int:
        hindered.append(not unhindered)
        return -errno.EINTR if hindered[-1] else 0

    monkeypatch.setattr("aio.files.lib", Replaced(_native.lib, aio_file_allocate=allocate))
    with Engine("posix") as engine, engine.open(tmp_path / "data", "w", size=4096):
        assert len(hindered) > 2
        assert hindered.index(False) == len(hindered) - 1


@pytest.mark.parametrize("call", ["aio_file_allocate", "aio_file_truncate"])
def test_interrupt_while_a_file_changes_its_length_is_raised_before_the_next_try(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def interrupted(*_: object) -> int:
        calls.append(call)
        if len(calls) == 3:
            _thread.interrupt_main()
        return -errno.EINTR

    with Engine("posix") as engine, engine.open(tmp_path / "data", "w") as file:
        monkeypatch.setattr("aio.files.lib", Replaced(_native.lib, **{call: interrupted}))
        with pytest.raises(KeyboardInterrupt):
            file.allocate(0, 10) if "allocate" in call else file.truncate(10)
        assert len(calls) == 3


_NO_THREAD = "int pthread_create(void) { return 11; /* EAGAIN */ }"
_LANES = """
    from aio import AioError, Engine
    for backend in ("auto", "libaio"):
        try:
            Engine(backend, lanes=4)
        except AioError as error:
            print(error.strerror, "|", error)
"""


def test_engine_without_threads_says_what_there_is_too_little_of(tmp_path: Path) -> None:
    library = str(_library(tmp_path, _NO_THREAD))
    lines = run_python(_LANES, LD_PRELOAD=library, OPENBLAS_NUM_THREADS="1")
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("Resource temporarily unavailable | cannot start an engine")
        assert "each of 4 lanes takes a thread" in line
        assert "RLIMIT_NPROC" in line
        assert "RLIMIT_AS" in line


def test_close_that_fails_names_the_file_and_closes_both_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(descriptor: object) -> int:
        number = _native.lib.aio_descriptor_close(descriptor)
        return number or -errno.EIO

    with Engine("posix") as engine:
        file = engine.open(tmp_path / "data", "w")
        before = open_descriptors()
        held = {file._fd, getattr(file._direct.descriptor, "number", file._fd)}
        monkeypatch.setattr(
            "aio.process.descriptors.lib", Replaced(_native.lib, aio_descriptor_close=close)
        )
        with pytest.raises(AioError, match=r"cannot close .*data: Input/output error"):
            file.close()
        assert before - open_descriptors() == held


def test_threads_have_room_beside_what_libraries_keep_for_each_of_them(tmp_path: Path) -> None:
    source = '__thread char kept[%d] __attribute__((tls_model("initial-exec")));'
    for nbytes in (240_000, 3_000_000):  # of a stack of 256 KiB nothing is left, or little
        library = _library(tmp_path, source % nbytes)
        lines = run_python(_BACKENDS, str(tmp_path / "data"), LD_PRELOAD=str(library))
        assert lines == ["10"], nbytes


def test_slab_larger_than_the_memory_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aio.process.memory.available_bytes", lambda: 1 << 20)
    with pytest.raises(AioError, match="1048576 are available"):
        Slab(2 << 20, lock="required")
    monkeypatch.setattr("aio.process.memory.available_bytes", lambda: 1 << 30)
    with pytest.raises(AioError, match="1073741824 are available, and it takes 108"):
        Slab((1 << 30) - 4096, lock="required")  # the kernel's own tables are left no room
    with pytest.raises(MemoryError):
        Slab(1 << 64)
    with pytest.raises(ValueError, match="max_pending_bytes=18446744073709551616 is not between"):
        Engine("posix", max_pending_bytes=1 << 64)
