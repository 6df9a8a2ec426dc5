"""The turn of a process at an nvme directory, which is locked meanwhile."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest

from aio import Engine
from aio.process.descriptors import Descriptor
from swap.storage.drives import directory
from swap.storage.drives.directory import SwapDirectory, locked, reclaim


def test_interrupt_as_the_turn_ends_does_not_leave_the_directory_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, cuts = Descriptor.close, iter([True])

    def interrupted(descriptor: Descriptor) -> None:
        if descriptor._name == str(tmp_path) and next(cuts, False):
            raise KeyboardInterrupt
        close(descriptor)

    monkeypatch.setattr(Descriptor, "close", interrupted)
    monkeypatch.setattr(directory, "_TURN_SECONDS", 1.0)
    with Engine("posix") as engine, pytest.raises(KeyboardInterrupt) as caught:
        SwapDirectory(tmp_path, engine)
    assert [*tmp_path.iterdir()] == []
    assert caught.tb is not None  # which keeps what the interrupted frames had
    with locked(tmp_path):
        pass


def test_child_forked_as_orphans_are_removed_does_not_keep_the_directory_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []

    def fork(folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other tests have left threads
            child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)

    monkeypatch.setattr(directory, "_remove_if_empty", fork)
    reclaim(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(directory, "_TURN_SECONDS", 1.0)
    try:
        with locked(tmp_path):
            pass
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 1
