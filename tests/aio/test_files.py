"""Opening files, using and closing them, their sizes and space."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from aio import AioError, Engine, _native, opening
from tests.aio.conftest import Gate, Replaced, open_descriptors, random_bytes

MIB = 1 << 20


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

    @pytest.mark.parametrize(("mode", "size"), [("r", 10), ("w", -1), ("w", 1 << 63)])
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

    def test_zeroed_range_reads_as_zeros_and_nothing_beside_it(self, tmp_path: Path) -> None:
        content = random_bytes(5 * 4096)
        with Engine() as engine, engine.open(tmp_path / "data", "w") as file:
            engine.write(file, 0, content).result()
            if not file.zero(4096, 2 * 4096):
                pytest.skip("needs a file system that makes zeros of ranges, such as ext4 or xfs")
            back = np.empty_like(content)
            engine.read(file, 0, back).result()
        content[4096 : 3 * 4096] = 0
        assert np.array_equal(back, content)

    def test_range_that_cannot_be_zeroed_is_said_or_a_named_error(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outcomes = iter([-errno.EOPNOTSUPP, -errno.EINTR, -errno.EIO])
        refusing = Replaced(_native.lib, aio_file_zero=lambda *_: next(outcomes))
        with plain.open(tmp_path / "data", "w", size=4096) as file:
            monkeypatch.setattr("aio.files.lib", refusing)
            assert not file.zero(0, 4096)
            with pytest.raises(AioError, match=r"cannot zero 4096 bytes at offset 0 of .*/data"):
                file.zero(0, 4096)
        with plain.open(tmp_path / "data", "r") as file, pytest.raises(ValueError, match="zero"):
            file.zero(0, 4096)
