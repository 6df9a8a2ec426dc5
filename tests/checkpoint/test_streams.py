"""File objects for torch.save and torch.load."""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoint
from aio import Engine, Operation
from tests.aio.conftest import run_python
from tests.checkpoint.trees import assert_same
from tests.support.examples import examples
from tests.support.scripts import Script

SIZES = [0, 1, 4095, 4096, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, (70 << 20) + 5]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def content(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_saves_to_and_loads_from_a_stream(tmp_path: Path, legacy: bool) -> None:
    state = {"x": torch.randn(5_000_000), "y": [torch.arange(10), "text"], "z": torch.randn(7).t()}
    with checkpoint.open_stream(tmp_path / "model.pt", "wb") as stream:
        torch.save(state, stream, _use_new_zipfile_serialization=not legacy)
    assert_same(state, torch.load(tmp_path / "model.pt"))
    with checkpoint.open_stream(tmp_path / "model.pt", "rb") as stream:
        assert_same(state, torch.load(stream))
    assert names(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_what_is_in_the_file(tmp_path: Path, nbytes: int) -> None:
    data = content(nbytes)
    with checkpoint.open_stream(tmp_path / "file", "wb") as stream:
        for start in range(0, nbytes, 3_333_333):
            piece = data[start : start + 3_333_333]
            assert stream.write(piece) == len(piece)
        assert stream.tell() == nbytes
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == data
    with checkpoint.open_stream(tmp_path / "file") as stream:
        assert stream.read() == data


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "file"
    path.write_bytes(content(30_000_001))
    return path


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2]),
            st.integers(-40_000_000, 40_000_000),
            st.integers(0, 9 << 20),
        ),
        max_size=8,
    )
)
def test_reading_and_seeking_is_that_of_a_file(
    file: Path, moves: list[tuple[int, int, int]]
) -> None:
    with checkpoint.open_stream(file) as stream, file.open("rb") as reference:
        for whence, offset, nbytes in moves:
            try:
                expected = reference.seek(offset, whence)
            except OSError:
                with pytest.raises(OSError, match="before the beginning"):
                    stream.seek(offset, whence)
                continue
            assert stream.seek(offset, whence) == expected
            assert stream.read(nbytes) == reference.read(nbytes)
            assert stream.tell() == reference.tell()


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    stream.write(content(20 << 20))
    with pytest.raises(RuntimeError, match="in the middle"), stream:
        raise RuntimeError("in the middle")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"more")


def test_a_stream_that_nobody_closed_is_no_file(tmp_path: Path) -> None:
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    stream.write(b"text")
    assert len(names(tmp_path)) == 1
    assert run_while_dropped([stream]) == []
    with pytest.warns(ResourceWarning, match=f"stream to {tmp_path / 'file'} was never closed"):
        del stream
    assert names(tmp_path) == []


@pytest.mark.parametrize("ends", ["closed", "failed", "read"])
def test_a_stream_that_was_ended_gives_no_warning(tmp_path: Path, ends: str) -> None:
    with checkpoint.open_stream(tmp_path / "file", "wb") as first:
        first.write(b"text")
    stream = checkpoint.open_stream(tmp_path / "file", "rb" if ends == "read" else "wb")
    if ends == "closed":
        stream.close()
    elif ends == "failed":
        with pytest.raises(RuntimeError, match="in the middle"), stream:
            raise RuntimeError("in the middle")
    del stream, first
    with pytest.raises(FileNotFoundError):
        checkpoint.open_stream(tmp_path / "none" / "file", "wb")
    gc.collect()


def test_a_forked_child_does_not_tell_of_its_parents_streams(tmp_path: Path) -> None:
    script = """
        import os, sys, warnings
        import checkpoint

        warnings.simplefilter("always")
        stream = checkpoint.open_stream(sys.argv[1], "wb")
        stream.write(b"text")
        if os.fork() == 0:
            with warnings.catch_warnings(record=True) as told:
                del stream
                print(len(told), flush=True)
            os._exit(0)
        os.wait()
        stream.close()
    """
    assert run_python(script, str(tmp_path / "file")) == ["0"]
    assert names(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
def test_letting_go_of_a_stream_runs_no_python(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text" * 10_000)
    for mode in ("rb", "wb"):
        stream: Any = checkpoint.open_stream(tmp_path / "file", mode)
        _ = stream.read(10) if mode == "rb" else stream.write(b"more")
        held = [stream]
        del stream
        assert run_while_dropped(held) == []
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").stat().st_size == 40_000


def run_while_dropped(held: list[Any]) -> list[str]:
    """The functions of ours that run on this thread while the last references go."""
    run: list[str] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).parts[-2] in ("checkpoint", "aio"):
            run.append(frame.f_code.co_qualname)

    sys.setprofile(called)
    held.clear()
    sys.setprofile(None)
    return run


def test_a_write_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        def result(self) -> int:
            raise OSError(28, "No space left on device", "file")

        def abandon(self) -> None: ...

    monkeypatch.setattr(Engine, "write", lambda *_: Failed())
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    with pytest.raises(OSError, match="No space left"), stream:
        stream.write(content(100 << 20))
    assert names(tmp_path) == []
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    stream.write(b"little")
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert names(tmp_path) == []


def test_what_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoint.open_stream(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        checkpoint.open_stream(tmp_path / "nowhere" / "file", "wb")
    with pytest.raises(ValueError, match="neither"):
        checkpoint.open_stream(tmp_path / "file", "r+")  # type: ignore[arg-type]
    with (
        checkpoint.open_stream(tmp_path / "file", "wb") as stream,
        pytest.raises(io.UnsupportedOperation),
    ):
        stream.read(1)


@pytest.mark.parametrize("path", ["/proc/cpuinfo", "/sys/kernel/mm/ksm/run"])
def test_a_file_of_the_kernel_is_refused_and_not_taken_for_an_empty_one(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    with (
        pytest.raises(OSError, match=r"its size is not known|end of file") as caught,
        checkpoint.open_stream(path) as stream,
    ):
        stream.read()
    assert caught.value.filename == path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint.streams._BLOCK_BYTES", 4096)
    monkeypatch.setattr("checkpoint.streams._SMALL_READ_BYTES", 512)


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_was_kept_longest_is_kept_while_those_behind_it_come(tmp_path: Path) -> None:
    data = content(20 * 4096)
    (tmp_path / "file").write_bytes(data)
    with checkpoint.open_stream(tmp_path / "file") as stream:
        for block in [6, 0, 2, 8, 10, 12, 14, 5, 6]:
            stream.seek(block * 4096)
            assert stream.read(10) == data[block * 4096 :][:10]


@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.usefixtures("small_blocks")
@given(st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 20_000)), max_size=20))
def test_reading_anywhere_is_that_of_a_file(file: Path, moves: list[tuple[int, int]]) -> None:
    with checkpoint.open_stream(file) as stream, file.open("rb") as reference:
        for offset, nbytes in moves:
            stream.seek(offset)
            reference.seek(offset)
            assert stream.read(nbytes) == reference.read(nbytes)


def test_a_read_that_failed_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    results = iter([OSError(5, "a transient error")])
    result = Operation.result

    def fail_once(operation: Operation, timeout: float | None = None) -> int:
        for error in results:
            raise error
        return result(operation, timeout)

    with checkpoint.open_stream(tmp_path / "file") as stream:
        monkeypatch.setattr(Operation, "result", fail_once)
        with pytest.raises(OSError, match="transient"):
            stream.read()
        assert stream.read() == b"abc"


def test_what_a_killed_process_left_goes_with_the_next_stream(tmp_path: Path) -> None:
    killed = "import os, sys, checkpoint\n"
    killed += "stream = checkpoint.open_stream(sys.argv[1], 'wb')\n"
    killed += "stream.write(b'x')\nos._exit(9)"
    script = Script(killed, tmp_path / "file")
    assert script.end() == ("", "")
    assert script.returncode == 9
    (tmp_path / ".file.notes.tmp").write_text("not ours")
    assert len(names(tmp_path)) == 2
    with (
        checkpoint.open_stream(tmp_path / "file", "wb") as one,
        checkpoint.open_stream(tmp_path / "file", "wb") as other,
    ):
        one.write(b"one")
        other.write(b"other")
    assert names(tmp_path) == [".file.notes.tmp", "file"]
    assert (tmp_path / "file").read_bytes() == b"one", "closed last"


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to a pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe" if kind.startswith("link") else path)
    if kind.startswith("link"):
        path.symlink_to("pipe")
    before = names(tmp_path)
    with pytest.raises(OSError, match=r"(Is a directory|a device or a pipe)"):
        checkpoint.open_stream(path, "wb")
    assert names(tmp_path) == before
    assert not path.is_file()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    with checkpoint.open_stream(path, "wb") as stream:
        stream.write(b"new")
    assert path.stat().st_mode & 0o777 == mode
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["n" * 255, "\N{GREEK SMALL LETTER ALPHA}" * 127])
def test_a_name_may_be_as_long_as_file_systems_take(tmp_path: Path, name: str) -> None:
    with checkpoint.open_stream(tmp_path / name, "wb") as stream:
        stream.write(b"text")
    assert names(tmp_path) == [name]


def test_a_closed_stream_that_was_read_says_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one")
    stream = checkpoint.open_stream(tmp_path / "file", "rb")
    stream.close()
    for use in (stream.read, stream.tell, lambda: stream.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            use()
