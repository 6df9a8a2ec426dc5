"""Sync errors, files without direct I/O, full disks and limits on the size of files."""

import errno
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest

from aio import AioError, Backend, Engine, MemoryBackend, _native, sync_directory
from tests.aio.conftest import Replaced, random_bytes, run_python
from tests.support import aio_loop

MIB = 1 << 20
_no_loop = aio_loop.unavailable_reason()
needs_loop = pytest.mark.skipif(_no_loop is not None, reason=str(_no_loop))


class TestDurability:
    def test_sync_error_is_remembered(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel tells of a lost page once; a second fsync would claim success."""
        with plain.open(tmp_path / "data", "w") as file:
            failures = [OSError(errno.EIO, os.strerror(errno.EIO))]

            def fsync(fd: int) -> None:
                if failures:
                    raise failures.pop()

            monkeypatch.setattr(os, "fsync", fsync)
            for _ in range(2):
                with pytest.raises(AioError, match="write it again to another file") as caught:
                    file.sync()
                assert caught.value.errno == errno.EIO
                assert caught.value.filename == str(tmp_path / "data")

    def test_what_a_handler_raises_in_a_sync_is_no_error_of_the_disk(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That of a time limit is an OSError as a rule: `TimeoutError`."""

        def interrupted(fd: int) -> None:
            raise TimeoutError("no time left")

        with plain.open(tmp_path / "data", "w") as file:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", interrupted)
                for sync in (file.sync, lambda: sync_directory(tmp_path)):
                    with pytest.raises(TimeoutError, match="no time left"):
                        sync()
            file.sync()

    def test_sync_directory_of_a_missing_one_raises_file_not_found(self, tmp_path: Path) -> None:
        sync_directory(tmp_path)
        with pytest.raises(FileNotFoundError):
            sync_directory(tmp_path / "missing")
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            sync_directory(tmp_path / "file")


class TestBuffered:
    def test_file_without_direct_io_works_with_one_warning_a_process(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = Path("/dev/shm")
        if not folder.is_dir():
            pytest.skip("needs /dev/shm, a file system without direct I/O")
        content = random_bytes(3 * MIB + 1)
        paths = [folder / f"aio-test-{os.getpid()}-{i}" for i in range(2)]
        try:
            for path in paths:
                with Engine(block_bytes=1 << 16) as engine:
                    with engine.open(path, "w") as file:
                        assert not file.direct
                        engine.write(file, 0, content).result()
                        back = np.empty_like(content)
                        engine.read(file, 0, back).result()
                    assert np.array_equal(back, content)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == (
            "/dev/shm: no direct I/O (the file system has none), so its data goes through the page"
            " cache, which costs a copy, processor time and memory"
        )

    def test_direct_io_that_the_kernel_refuses_falls_back_with_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        content = random_bytes(MIB + 1)
        with (
            Engine(MemoryBackend(refuse_direct=True), block_bytes=1 << 16) as engine,
            engine.open(tmp_path / "data", "w") as file,
        ):
            if not file.direct:
                pytest.skip(f"needs a file system with direct I/O: {file.direct_reason}")
            for _ in range(2):
                engine.write(file, 0, content[1:]).result()
                engine.write(file, 0, content).result()
            assert file.direct_reason == "the kernel refused a direct transfer"
        assert (tmp_path / "data").read_bytes() == content.tobytes()
        (record,) = caplog.records
        assert "the kernel refused a direct transfer" in record.getMessage()

    def test_file_system_without_allocation_still_grows_files_and_is_warned_of_once(
        self,
        plain: Engine,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        refusing = Replaced(_native.lib, aio_file_allocate=lambda *_: -errno.EOPNOTSUPP)
        monkeypatch.setattr("aio.files.lib", refusing)
        with plain.open(tmp_path / "data", "w", size=5000) as file:
            assert file.size() == 5000
            file.allocate(0, 100)
            assert file.size() == 5000
        for name in ("data", "other"):
            with plain.open(tmp_path / name, "w", size=5000):
                pass
        with Engine() as other, other.open(tmp_path / "third", "w", size=5000):
            pass
        told = [record.getMessage() for record in caplog.records]
        assert len([message for message in told if "cannot reserve space" in message]) == 1


@needs_loop
class TestFullDisk:
    def test_reserving_too_much_fails_at_open_and_leaves_no_file(self) -> None:
        with (
            aio_loop.loop_mount(16 * MIB) as folder,
            Engine() as engine,
        ):
            for mode in ("w", "x"):
                with pytest.raises(AioError) as caught:
                    engine.open(folder / "big", mode, size=64 * MIB)
                assert caught.value.errno == errno.ENOSPC
                assert caught.value.nbytes == 64 * MIB
                assert not (folder / "big").exists()
            kept = folder / "kept"
            kept.write_bytes(b"before")
            with pytest.raises(AioError):
                engine.open(kept, "r+", size=64 * MIB)
            assert kept.read_bytes() == b"before"
            with engine.open(folder / "fits", "x", size=8 * MIB) as file:
                assert file.size() == 8 * MIB

    def test_write_that_does_not_fit_fails_and_the_disk_is_usable_again(
        self, real_backend: Backend
    ) -> None:
        content = random_bytes(4 * MIB)
        with aio_loop.loop_mount(16 * MIB) as folder, Engine(real_backend) as engine:
            with engine.open(folder / "data", "w") as file:
                engine.write(file, 0, content).result()
                with pytest.raises(AioError) as caught:
                    engine.write(file, len(content), np.zeros(32 * MIB, np.uint8)).result()
                assert str(caught.value) == (
                    f"cannot write {32 * MIB} bytes at offset {len(content)} of {folder / 'data'}:"
                    " No space left on device"
                )
                assert (caught.value.errno, caught.value.transferred) == (errno.ENOSPC, 0)
                file.truncate(len(content))
                engine.write(file, len(content), content).result()
                back = np.empty(2 * len(content), np.uint8)
                engine.read(file, 0, back).result()
                file.sync()
            assert np.array_equal(back, np.concatenate([content, content]))


# A soft limit on file sizes: the kernel moves what fits below it, then says EFBIG.
_LIMITED = """
    import errno, logging, os, resource, signal, sys
    from aio import AioError, Engine

    path, backend = sys.argv[1:]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Engine(backend, queue_depth=4, block_bytes=1 << 16) as engine:
        with engine.open(path, "w", size=1 << 20) as file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_001, 300_001))
            content = bytes(range(256)) * 4096
            try:
                engine.write(file, 0, content).result()
            except AioError as error:
                print(error.errno == errno.EFBIG, error.transferred, error)
            try:
                engine.write(file, 2 << 20, content).result()
            except AioError as error:
                print(error.errno == errno.EFBIG, error.transferred, error)
            assert engine.write(file, 200_000, content[:100_001]).result() == 100_001
            back = bytearray(200_000)
            engine.read(file, 0, back).result()
            print(back == content[:200_000])
"""


def test_short_write_of_the_kernel_is_an_error_with_the_bytes_that_moved(
    real_backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    first, second, intact = run_python(_LIMITED, str(path), real_backend)
    is_efbig, moved, _, message = re.split(r" (\d+) (?=(cannot))", first)
    assert (is_efbig, message) == (
        "True",
        f"cannot write 1048576 bytes at offset 0 of {path}: File too large after {moved} bytes",
    )
    # Of the block that the limit cuts, the error of a later one may keep the lane from going on.
    assert 4 * 65536 <= int(moved) <= 300_001
    assert second == (
        f"True 0 cannot write 1048576 bytes at offset 2097152 of {path}: File too large"
    )
    assert intact == "True"
