"""Opening, sizes, space and durability of files."""

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from aio import AioError, Backend, Engine, MemoryBackend, _native, opening, sync_directory
from tests.aio.conftest import Gate, Replaced, open_descriptors, random_bytes, run_python
from tests.support import aio_loop

MIB = 1 << 20
_no_loop = aio_loop.unavailable_reason()
needs_loop = pytest.mark.skipif(_no_loop is not None, reason=str(_no_loop))


@pytest.fixture
def plain() -> Iterator[Engine]:
    with Engine("posix") as engine:
        yield engine


class TestOpen:
    def test_missing_path_raises_file_not_found(self, plain: Engine, tmp_path: Path) -> None:
        for mode in ("r", "r+"):
            with pytest.raises(FileNotFoundError) as caught:
                plain.open(tmp_path / "missing", mode)
            assert caught.value.filename == str(tmp_path / "missing")

    def test_exclusive_open_of_an_existing_file_raises_and_keeps_it(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(100)
        with pytest.raises(FileExistsError):
            plain.open(path, "x")
        assert path.stat().st_size == 100

    def test_directory_raises_is_a_directory(self, plain: Engine, tmp_path: Path) -> None:
        for mode in ("r", "w"):
            with pytest.raises(IsADirectoryError):
                plain.open(tmp_path, mode)

    def test_pipe_is_refused(self, plain: Engine) -> None:
        read_end, write_end = os.pipe()
        with pytest.raises(ValueError, match="neither a regular file nor a block device"):
            plain.open(f"/proc/self/fd/{read_end}")
        os.close(read_end)
        os.close(write_end)

    def test_write_mode_empties_and_update_mode_keeps(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(100)
        with plain.open(path, "r+") as file:
            assert file.size() == 100
        with plain.open(path, "w") as file:
            assert file.size() == 0

    @pytest.mark.parametrize("mode", ["rb", "a", "", "w+"])
    def test_unknown_mode_is_refused_before_anything_happens(
        self, plain: Engine, tmp_path: Path, mode: Literal["w"]
    ) -> None:
        with pytest.raises(ValueError, match=r'is not one of "r", "r\+", "w" and "x"'):
            plain.open(tmp_path / "new", mode)
        assert not (tmp_path / "new").exists()

    def test_size_is_reserved_and_never_shrinks_a_file(
        self, plain: Engine, make_file: Callable[..., Path], tmp_path: Path
    ) -> None:
        with plain.open(tmp_path / "new", "x", size=MIB) as file:
            assert file.size() == MIB
        assert (tmp_path / "new").stat().st_blocks * 512 >= MIB
        with plain.open(make_file(2 * MIB), "r+", size=MIB) as file:
            assert file.size() == 2 * MIB

    @pytest.mark.parametrize(("mode", "size"), [("r", 10), ("w", -1)])
    def test_size_that_cannot_be_is_refused(
        self, plain: Engine, make_file: Callable[..., Path], mode: Literal["r", "w"], size: int
    ) -> None:
        path = make_file(100)
        with pytest.raises(ValueError, match="cannot be reserved"):
            plain.open(path, mode, size=size)
        assert path.stat().st_size == 100

    def test_alignments_are_powers_of_two_that_go_with_direct(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        with plain.open(make_file(10)) as file:
            for alignment in (file.memory_alignment, file.offset_alignment):
                assert alignment > 0
                assert alignment & (alignment - 1) == 0
                assert file.direct or alignment == 1
            assert file.direct == (file.direct_reason == "")

    def test_direct_io_works_where_proc_is_not_mounted(
        self,
        plain: Engine,
        make_file: Callable[..., Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        path = make_file(10)
        with plain.open(path) as file:
            reason = file.direct_reason
        monkeypatch.setattr(opening, "_DESCRIPTORS", tmp_path / "missing")
        with plain.open(path) as file:
            assert file.direct_reason == reason

    def test_file_that_is_replaced_while_it_is_opened_is_never_half_of_each(
        self, make_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, other = make_file(10), make_file(20, name="other")
        with path.open("rb") as handle:
            other.replace(path)
            before = open_descriptors()
            monkeypatch.setattr(opening, "_DESCRIPTORS", tmp_path / "missing")
            with pytest.raises(OSError, match="the name now means another file"):
                opening._reopen(handle.fileno(), path, os.O_RDONLY)
            assert open_descriptors() == before

    def test_descriptors_are_closed_and_none_is_inherited(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(10)
        before = open_descriptors()
        file = plain.open(path)
        ours = open_descriptors() - before
        assert len(ours) == (2 if file.direct else 1)
        assert not any(os.get_inheritable(fd) for fd in ours)
        file.close()
        file.close()
        assert open_descriptors() == before

    def test_file_that_is_dropped_warns_and_closes(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path, before = make_file(10), open_descriptors()
        file = plain.open(path)
        with pytest.warns(ResourceWarning, match="was never closed"):
            del file
        assert open_descriptors() == before


class TestUse:
    def test_closed_file_refuses_everything_by_name(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(10)
        file = plain.open(path, "r+")
        file.close()
        for use in (
            lambda: plain.read(file, 0, bytearray(1)),
            lambda: plain.write(file, 0, b"x"),
            file.size,
            file.sync,
            lambda: file.truncate(0),
            lambda: file.allocate(0, 1),
        ):
            with pytest.raises(ValueError, match="is closed") as caught:
                use()
            assert str(path) in str(caught.value)

    def test_read_only_file_refuses_changes_and_says_which_mode(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(10)
        with plain.open(path) as file:
            with pytest.raises(ValueError, match="cannot write to") as caught:
                plain.write(file, 0, b"x")
            with pytest.raises(ValueError, match="cannot truncate"):
                file.truncate(5)
            with pytest.raises(ValueError, match="cannot allocate space in"):
                file.allocate(0, 100)
        assert str(caught.value) == (
            f'cannot write to {path}: it was opened with mode "r", open it with "r+"'
        )
        assert path.stat().st_size == 10

    def test_file_of_another_engine_is_refused(
        self, plain: Engine, make_file: Callable[..., Path]
    ) -> None:
        with (
            Engine("posix") as other,
            other.open(make_file(10)) as file,
            pytest.raises(ValueError, match="was opened by another engine"),
        ):
            plain.read(file, 0, bytearray(1))

    def test_close_waits_for_operations_in_flight(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(0)
        file = gated.open(path, "r+")
        operation = gated.write(file, 0, b"x" * 10_000)
        gate.open()
        file.close()
        assert operation.done()
        assert path.read_bytes() == b"x" * 10_000

    def test_close_inside_a_callback_leaves_the_file_to_the_last_operation(
        self, gate: Gate, gated: Engine, make_file: Callable[..., Path]
    ) -> None:
        path = make_file(0)
        before = open_descriptors()
        file = gated.open(path, "r+")
        first, second = gated.write(file, 0, b"a"), gated.write(file, 1, b"b")
        first.add_done_callback(lambda _: file.close())
        second.add_done_callback(lambda _: file.close())
        gate.open()
        assert first.result() + second.result() == 2
        gated.close()
        assert path.read_bytes() == b"ab"
        assert open_descriptors() <= before

    def test_truncated_file_can_be_written_again(self, plain: Engine, tmp_path: Path) -> None:
        content = random_bytes(100_000)
        with plain.open(tmp_path / "data", "w") as file:
            plain.write(file, 0, content).result()
            file.truncate(10)
            assert file.size() == 10
            plain.write(file, 50_000, content).result()
            assert file.size() == 150_000
        expected = np.concatenate([content[:10], np.zeros(49_990, np.uint8), content])
        assert np.array_equal(np.fromfile(tmp_path / "data", np.uint8), expected)

    def test_allocated_range_reads_as_zeros(self, plain: Engine, tmp_path: Path) -> None:
        with plain.open(tmp_path / "data", "w") as file:
            file.allocate(10_000, 5_000)
            back = bytearray(b"x" * 15_000)
            plain.read(file, 0, back).result()
        assert back == bytes(15_000)

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, -1), (1 << 62, 1 << 62)])
    def test_allocation_of_an_impossible_range_is_refused(
        self, plain: Engine, tmp_path: Path, offset: int, nbytes: int
    ) -> None:
        with (
            plain.open(tmp_path / "data", "w") as file,
            pytest.raises(ValueError, match="cannot allocate"),
        ):
            file.allocate(offset, nbytes)


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

    def test_sync_directory_of_a_missing_one_raises_file_not_found(self, tmp_path: Path) -> None:
        sync_directory(tmp_path)
        with pytest.raises(FileNotFoundError):
            sync_directory(tmp_path / "missing")
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            sync_directory(tmp_path / "file")


class TestBuffered:
    def test_file_without_direct_io_works_with_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = Path("/dev/shm")
        if not folder.is_dir():
            pytest.skip("needs /dev/shm, a file system without direct I/O")
        content = random_bytes(3 * MIB + 1)
        paths = [folder / f"aio-test-{os.getpid()}-{i}" for i in range(2)]
        try:
            with Engine(block_bytes=1 << 16) as engine:
                for path in paths:
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

    def test_file_system_without_allocation_still_grows_files(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusing = Replaced(_native.lib, aio_file_allocate=lambda *_: -errno.EOPNOTSUPP)
        monkeypatch.setattr("aio.files.lib", refusing)
        with plain.open(tmp_path / "data", "w", size=5000) as file:
            assert file.size() == 5000
            file.allocate(0, 100)
            assert file.size() == 5000


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
