"""An error that passes, while a checkpoint is replaced, makes nothing forgotten."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from aio.process.descriptors import Descriptor
from checkpoint.directory.owners import OWNER_NAME
from checkpoint.directory.stripe_list import STRIPES_NAME
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

CODES = [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES]


@pytest.fixture
def fail_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[str]]:
    """Lets the next opening of a file of that name for reading fail; gives what failed."""

    def fail(name: str, code: int) -> list[str]:
        failed: list[str] = []
        really = Descriptor.open

        def opened(self: Descriptor, path: Any, flags: int, *more: Any, **options: Any) -> None:
            is_meant = Path(os.fspath(path)).name == name and not flags & os.O_CREAT
            if is_meant and not failed:
                failed.append(os.fspath(path))
                raise OSError(code, os.strerror(code), os.fspath(path))
            really(self, path, flags, *more, **options)

        monkeypatch.setattr(Descriptor, "open", opened)
        return failed

    return fail


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"w{k}": torch.full((1000,), number) for k in range(4)}


def saves_on(stripes: list[Path]) -> list[int]:
    return [len(list(stripe.iterdir())) for stripe in stripes]


@pytest.mark.parametrize("name", [STRIPES_NAME, OWNER_NAME])
@pytest.mark.parametrize("code", CODES)
def test_data_of_a_save_whose_list_or_owner_cannot_be_read_are_removed_by_the_next_save(
    tmp_path: Path,
    stripes: list[Path],
    fail_once: Callable[[str, int], list[str]],
    caplog: pytest.LogCaptureFixture,
    name: str,
    code: int,
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(state(1), path, stripes).uuid
    failed = fail_once(name, code)
    checkpoint.save(state(2), path, stripes)
    assert failed
    assert f"cannot remove what save {first} left: [Errno {code}]" in caplog.text
    assert name in caplog.text
    assert (path / first / STRIPES_NAME).is_file()
    checkpoint.save(state(3), path, stripes)
    assert saves_on(stripes) == [1, 1]
    assert not (path / first).exists()


def test_a_step_whose_list_cannot_be_read_is_retired_after_the_next_save(
    tmp_path: Path, stripes: list[Path], fail_once: Callable[[str, int], list[str]]
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=1)
    manager.save(1, state(1))
    failed = fail_once(STRIPES_NAME, errno.EMFILE)
    manager.save(2, state(2))
    assert failed
    manager.save(3, state(3))
    assert saves_on(stripes) == [1, 1]
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["step-3"]


@pytest.fixture
def is_unlisted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that cannot be listed."""
    unlisted: list[Path] = []
    really = os.scandir

    def scandir(path: Any) -> Any:
        if path in unlisted:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return unlisted


def test_data_in_a_directory_that_cannot_be_listed_are_found_by_the_next_save(
    tmp_path: Path, stripes: list[Path], is_unlisted: list[Path]
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(state(1), path, stripes[:1]).uuid
    (stripes[0] / f"run.{first}").rename(stripes[1] / f"run.{first}")
    is_unlisted.append(stripes[1])
    checkpoint.save(state(2), path, stripes)
    is_unlisted.clear()
    assert (path / first / STRIPES_NAME).is_file()
    checkpoint.save(state(3), path, stripes)
    assert saves_on(stripes) == [1, 1]


def test_data_in_a_directory_that_cannot_be_listed_are_not_called_missing(
    tmp_path: Path, stripes: list[Path], is_unlisted: list[Path]
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(state(1), path, stripes[:1]).uuid
    (stripes[0] / f"run.{first}").rename(stripes[1] / f"other.{first}")
    is_unlisted.append(stripes[1])
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.load(path, stripe_dirs=[stripes[1]])
    is_unlisted.clear()
    assert int(checkpoint.load(path, stripe_dirs=[stripes[1]])["w3"][0]) == 1
