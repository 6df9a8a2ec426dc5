"""Opening what is no file, what is not there, and what fails half way: nothing is left behind."""

import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aio import (
    Engine,
    NotRegularFileError,
    naming,
    open_regular_file,
    opening,
    read_regular_file,
)
from aio.opening import Mode
from aio.process.descriptors import Descriptor
from tests.aio.conftest import descriptors_left, open_descriptors
from tests.support.interrupts import interrupt_behind_call


@pytest.fixture
def plain() -> Iterator[Engine]:
    with Engine("posix", block_bytes=4096) as engine:
        yield engine


@pytest.mark.parametrize("mode", ["r", "r+", "w", "x"])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", errno.ENOENT),
        ("new/", errno.ENOENT),
        ("new/.", errno.ENOENT),
        ("file/", errno.ENOTDIR),
        ("file/.", errno.ENOTDIR),
    ],
)
def test_name_that_no_file_has_is_refused_as_it_was_given(
    plain: Engine,
    tmp_path: Path,
    name: str,
    code: int,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(OSError, match=re.escape(repr(name))) as caught:
        plain.open(name, mode)
    assert caught.value.errno == code
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"kept"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("mode", ["r", "r+", "w"])
@pytest.mark.parametrize("has_proc", [True, False], ids=["proc", "no proc"])
def test_pipe_without_a_writer_is_refused_at_once(
    plain: Engine, tmp_path: Path, mode: Mode, has_proc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_proc:
        monkeypatch.setattr(opening, "_DESCRIPTORS", tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a regular file nor a block device"):
        plain.open(tmp_path / "pipe", mode)


@pytest.mark.timeout(20)
def test_pipe_that_takes_the_files_place_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.touch()
    monkeypatch.setattr(opening, "_DESCRIPTORS", tmp_path / "missing")
    before = open_descriptors()
    with Descriptor(path, os.O_PATH) as place:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(OSError, match="the name now means another file"):
            opening._reopen(place.number, path, os.O_RDONLY)
    assert open_descriptors() == before


def test_descriptor_that_was_reopened_by_name_waits_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.touch()
    monkeypatch.setattr(opening, "_DESCRIPTORS", tmp_path / "missing")
    with (
        Descriptor(path, os.O_PATH) as place,
        opening._reopen(place.number, path, os.O_RDWR) as again,
    ):
        assert os.get_blocking(again.number)


class TestCreated:
    def test_writing_through_a_dangling_link_creates_what_it_leads_to(
        self, plain: Engine, tmp_path: Path
    ) -> None:
        link, target = tmp_path / "link", tmp_path / "target"
        link.symlink_to("middle")
        (tmp_path / "middle").symlink_to(target)
        with plain.open(link, "w", size=10) as file:
            assert file.size() == 10
        assert link.is_symlink()
        assert target.stat().st_size == 10

    @pytest.mark.parametrize("leads", [False, True], ids=["name", "dangling link"])
    def test_file_that_was_created_in_vain_is_removed_and_a_link_stays(
        self, plain: Engine, tmp_path: Path, leads: bool
    ) -> None:
        path = tmp_path / "link"
        if leads:
            path.symlink_to(tmp_path / "target")
        before = open_descriptors()
        with pytest.raises(OSError, match="cannot allocate"):
            plain.open(path, "w", size=1 << 62)
        assert path.is_symlink() == leads
        assert not (tmp_path / "target").exists()
        assert not path.exists()
        assert open_descriptors() == before

    def test_file_that_took_the_place_of_the_created_one_is_not_removed(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, other = tmp_path / "new", tmp_path / "other"
        other.write_bytes(b"another's")

        def replaced(*_: object) -> opening.Direct:
            other.replace(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(opening, "_open_direct", replaced)
        with pytest.raises(OSError, match="Input/output error"):
            plain.open(path, "x")
        assert path.read_bytes() == b"another's"

    @pytest.mark.parametrize("mode", ["w", "x"])
    def test_file_whose_alignment_does_not_fit_is_neither_created_nor_emptied(
        self, plain: Engine, tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wide = opening.Direct(None, 512, 1 << 16, "")
        monkeypatch.setattr(opening, "_open_direct", lambda *_: wide)
        kept = tmp_path / "kept"
        kept.write_bytes(b"before")
        with pytest.raises(ValueError, match="is not a multiple of 65536"):
            plain.open(tmp_path / "new", mode)
        with pytest.raises((ValueError, FileExistsError)):
            plain.open(kept, mode)
        assert kept.read_bytes() == b"before"
        assert not (tmp_path / "new").exists()

    @pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
    def test_interrupt_at_any_call_leaves_no_file_and_no_descriptor(
        self, plain: Engine, tmp_path: Path
    ) -> None:
        path = tmp_path / "new"
        opened: list[bool] = []

        def action() -> None:
            with plain.open(path, "w", size=8192):
                opened.append(True)

        total = interrupt_behind_call(action, None).seen
        path.unlink()
        before = open_descriptors()
        for number in range(total):
            opened.clear()
            place = interrupt_behind_call(action, number).line
            assert place
            assert path.exists() == bool(opened), place
            assert open_descriptors() == before, place
            path.unlink(missing_ok=True)


class TestErrors:
    @pytest.mark.parametrize("left", [0, 1])
    @pytest.mark.parametrize("mode", ["r", "r+", "w", "x"])
    def test_too_many_open_files_is_an_error_and_no_buffered_file(
        self, plain: Engine, tmp_path: Path, mode: Mode, left: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "data"
        if mode != "x":
            path.write_bytes(b"before")
        with descriptors_left(2), plain.open(tmp_path / "other", "x") as file:
            if not file.direct:
                pytest.skip(f"needs a file system with direct I/O: {file.direct_reason}")
        with descriptors_left(left), pytest.raises(OSError, match="Too many open files") as caught:
            plain.open(path, mode)
        assert (caught.value.errno, caught.value.filename) == (errno.EMFILE, str(path))
        assert not caplog.records
        assert not path.exists() if mode == "x" else path.read_bytes() == b"before"

    @pytest.mark.parametrize("code", [errno.ENFILE, errno.ENOMEM, errno.EIO])
    def test_error_of_the_direct_descriptor_is_raised(
        self, plain: Engine, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "data"
        path.touch()
        monkeypatch.setattr(opening, "_reopen", _failing_direct(code))
        before = open_descriptors()
        with pytest.raises(OSError, match=os.strerror(code)):
            plain.open(path)
        assert open_descriptors() == before

    def test_direct_io_that_a_file_system_refuses_at_open_is_done_without(
        self, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "data"
        path.touch()
        monkeypatch.setattr(opening, "_reopen", _failing_direct(errno.EINVAL))
        with plain.open(path) as file:
            assert "open with O_DIRECT failed" in file.direct_reason or not file.direct

    def test_file_whose_name_is_gone_is_still_opened_with_its_warning(
        self,
        plain: Engine,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        path = tmp_path / "data"

        def unlinked(*_: object) -> opening.Direct:
            path.unlink()
            return opening.Direct(None, 1, 1, "for the test")

        monkeypatch.setattr(opening, "_open_direct", unlinked)
        with plain.open(path, "x") as file:
            assert plain.write(file, 0, b"abc").result() == 3
        (record,) = caplog.records
        assert "no direct I/O (for the test)" in record.getMessage()

    def test_unreadable_file_is_named_by_its_path(self, plain: Engine, tmp_path: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        path = tmp_path / "data"
        path.touch(mode=0o000)
        with pytest.raises(PermissionError) as caught:
            plain.open(path)
        assert caught.value.filename == str(path)

    def test_path_with_a_null_byte_is_refused(self, plain: Engine) -> None:
        with pytest.raises(ValueError, match="null byte"):
            plain.open("a\0b")


def _failing_direct(code: int) -> Callable[[int, Path, int], Descriptor]:
    """What opens an inode again, with an error for O_DIRECT."""
    reopen = opening._reopen

    def failing(fd: int, path: Path, flags: int) -> Descriptor:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), os.fspath(path))
        return reopen(fd, path, flags)

    return failing


class TestRegularFile:
    def test_a_file_gives_its_content_and_size(self, tmp_path: Path) -> None:
        (tmp_path / "list").write_bytes(b"12345")
        with open_regular_file(tmp_path / "list") as (file, nbytes):
            assert (file.read(), nbytes) == (b"12345", 5)
        assert read_regular_file(tmp_path / "list", 2) == b"12"

    def test_a_name_is_looked_up_in_the_directory_that_is_given(self, tmp_path: Path) -> None:
        (tmp_path / "list").write_bytes(b"1")
        with (
            Descriptor(tmp_path, os.O_RDONLY | os.O_DIRECTORY) as folder,
            open_regular_file("list", dir_fd=folder.number) as (file, _),
        ):
            assert file.read() == b"1"

    @pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
    def test_anything_else_is_refused_by_name(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "list"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(NotRegularFileError, match=re.escape(str(path))):
            read_regular_file(path)

    def test_a_link_that_is_not_to_be_followed_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "list").symlink_to("/etc/passwd")
        with pytest.raises(OSError, match="Too many levels") as caught:
            read_regular_file(tmp_path / "list", follow=False)
        assert caught.value.filename == str(tmp_path / "list")

    def test_an_error_of_reading_names_the_file(self) -> None:
        with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
            read_regular_file("/proc/self/mem", 1)

    def test_an_error_that_names_a_file_keeps_its_name(self) -> None:
        with pytest.raises(FileNotFoundError) as caught, naming("/other"):
            Path("/nowhere").stat()
        assert caught.value.filename == "/nowhere"


def test_read_that_ends_before_the_size_of_the_file_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"content")
    monkeypatch.setattr(opening._Raw, "readinto", lambda self, buffer: 0)
    monkeypatch.setattr(opening._Raw, "readall", lambda self: b"")
    for limit in (None, 3):
        with pytest.raises(OSError, match=r"ends behind 0 of its 7 bytes.*list") as caught:
            read_regular_file(path, limit)
        assert caught.value.errno == errno.EIO


def test_read_that_would_have_to_wait_is_an_error_not_none() -> None:
    source, target = os.pipe2(os.O_NONBLOCK)
    try:
        with io.BufferedReader(opening._Raw(source, "rb", closefd=False)) as file:
            for size in (-1, 3):
                with pytest.raises(BlockingIOError, match="unavailable"):
                    file.read(size)
    finally:
        os.close(source)
        os.close(target)
