"""A stream of which a write has failed gives no file and says so, whatever its writer does."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

import checkpoint
from aio import Engine
from tests.checkpoint.test_streams import content, names


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
