"""A stream of which a write has failed gives no file and says so, whatever its writer does."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

import checkpoint
from aio import Engine
from tests.checkpoint.test_streams import content, names
from tests.support.interrupts import interrupt


def test_a_write_that_failed_is_told_by_the_end_of_a_stream_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    lost = f"a write has failed.*OSError.*No space left.*{path}"
    stream = checkpoint.open_stream(path, "wb")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            stream.write(content(20 << 20))
    with pytest.raises(OSError, match=lost):
        stream.write(b"more")
    with pytest.raises(OSError, match=lost) as caught:
        stream.close()
    assert caught.value.errno == errno.ENOSPC
    stream.close()
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("ends", ["finally", "with", "handler", "with, another error"])
def test_an_error_of_a_write_that_is_on_its_way_is_the_one_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the first")

    def run(stream: BinaryIO) -> None:
        if ends == "finally":
            try:
                stream.write(content(20 << 20))
            finally:
                stream.close()
        elif ends == "handler":
            try:
                stream.write(content(20 << 20))
            except OSError:
                stream.close()
                raise
        else:
            with stream:
                try:
                    stream.write(content(20 << 20))
                except OSError:
                    if ends == "with":
                        raise
                raise RuntimeError("the first")

    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    monkeypatch.setattr(Engine, "write", fail)
    with pytest.raises((OSError, RuntimeError), match="the first") as caught:
        run(stream)
    assert "has failed" not in str(caught.value)
    assert names(tmp_path) == []


def fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "file")


def test_a_write_that_failed_is_told_while_another_error_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    monkeypatch.setattr(Engine, "write", fail)
    try:
        stream.write(content(20 << 20))
    except OSError as error:
        address = id(error)
    others: list[OSError] = []
    while not others or id(others[-1]) != address:  # it is free for another error now
        assert len(others) < 10_000
        others.append(OSError(errno.ENOENT, "another"))
    try:
        raise others[-1]
    except OSError:
        with pytest.raises(OSError, match="a write has failed"):
            stream.close()
    assert names(tmp_path) == []


def test_a_write_that_is_tried_again_where_its_error_is_handled_fails_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = checkpoint.open_stream(tmp_path / "file", "wb")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "write", fail)
        try:
            stream.write(content(20 << 20))
        except OSError:
            patch.undo()
            with pytest.raises(OSError, match="a write has failed"):
                stream.write(content(20 << 20))
    try:
        stream.write(b"more")
    except OSError:
        stream.close()  # what says so is on its way
    assert names(tmp_path) == []


def test_an_interrupt_of_a_write_that_fails_does_not_hide_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.streams._BLOCK_BYTES", 4096)
    data, number, silent = content(5000), 0, []
    while True:
        stream = checkpoint.open_stream(tmp_path / "file", "wb")

        def write(stream: BinaryIO = stream) -> None:
            with suppress(OSError):
                stream.write(data)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "write", fail)
            came = interrupt(write, number).line
        try:
            stream.close()
        except OSError:
            assert names(tmp_path) == []
        else:
            silent.append(came)
            assert (tmp_path / "file").read_bytes() == b"", "nothing of it was taken"
            (tmp_path / "file").unlink()
        if not came:
            break
        number += 1
    assert len(silent) < 15 < number, silent
