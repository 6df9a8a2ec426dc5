"""Descriptors that an interrupt meets: each has an owner from the moment that it is open."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.directory.files.replacing import replace_durably
from checkpoint.directory.generations import remove_generation, write_durably
from checkpoint.directory.locate import read_head
from checkpoint.directory.lock import Lock
from checkpoint.directory.owners import OWNER_NAME, opened_directory, read_owner
from tests.aio.conftest import open_descriptors
from tests.support.interrupts import interrupt_behind_call


def lock(folder: Path) -> None:
    with Lock(folder):
        pass


def replace(folder: Path) -> None:
    replace_durably(folder / "index", b"new")


def head(folder: Path) -> None:
    assert read_head(folder / "head") == b"head"


def owner(folder: Path) -> None:
    with opened_directory(folder) as directory:
        assert directory is not None
        assert read_owner(directory) is None


def removal(folder: Path) -> None:
    (folder / "12345678").mkdir(exist_ok=True)
    remove_generation(folder, "12345678")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # files and listings of Python's
@pytest.mark.parametrize("act", [lock, replace, head, owner, removal])
def test_descriptor_that_an_interrupt_meets_does_not_stay_open(
    tmp_path: Path, act: Callable[[Path], None]
) -> None:
    write_durably(tmp_path / "head", b"head")
    write_durably(tmp_path / OWNER_NAME, b"{}")
    before = open_descriptors()
    for number in range(interrupt_behind_call(lambda: act(tmp_path), None).seen):
        came = interrupt_behind_call(lambda: act(tmp_path), number)
        assert open_descriptors() == before, came.line
    with Lock(tmp_path):
        pass


def test_error_of_what_is_in_an_open_directory_names_it_by_its_whole_path(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError) as caught,
        opened_directory(tmp_path) as directory,
    ):
        os.unlink("nothing", dir_fd=directory)
    assert caught.value.filename == str(tmp_path / "nothing")


def test_error_of_a_lock_names_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(OSError, match=f"No locks available: '{tmp_path}'"),
        Lock(tmp_path),
    ):
        pass
