"""The turn of a process at an nvme directory, which is locked meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from aio import Engine
from aio.descriptors import Descriptor
from swap.storage.drives import directory
from swap.storage.drives.directory import SwapDirectory, locked


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
