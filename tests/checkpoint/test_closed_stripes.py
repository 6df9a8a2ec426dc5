"""Stripe directories that cannot be looked at, being for other users: others have the data."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import checkpoint
from checkpoint.directory import relocation
from tests.checkpoint.test_moving import holds, move, state
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def _refusing(really: Callable[..., Any], closed: Path, *, parent: bool) -> Callable[..., Any]:
    def refused(path: Path, **options: Any) -> Any:
        if closed in path.parents or (parent and path == closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, **options)

    return refused


@pytest.fixture(params=["closed", "behind a closed one", "not to be listed"])
def closed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is for other users."""
    closed = tmp_path / "closed"
    closed.mkdir()
    is_behind = request.param == "behind a closed one"
    if request.param != "not to be listed":
        for name in ("exists", "is_dir"):  # as of Python 3.14, on every one
            monkeypatch.setattr(Path, name, getattr(os.path, name.replace("_", "")))
        monkeypatch.setattr(Path, "stat", _refusing(Path.stat, closed, parent=is_behind))
    folders_of = _refusing(relocation.folders_of, closed, parent=True)
    monkeypatch.setattr(
        relocation, "folders_of", lambda directory, _: folders_of(directory, uuid=_)
    )
    return closed


def test_data_are_found_behind_a_directory_that_is_for_other_users(
    tmp_path: Path, stripes: list[Path], closed: Path
) -> None:
    checkpoint.save(state(1), tmp_path / "run", stripes)
    assert holds(1, tmp_path / "run", stripe_dirs=[closed])
    moved = move(stripes, "-moved")
    assert holds(1, tmp_path / "run", stripe_dirs=[closed, *moved])
    with pytest.raises(PermissionError, match="closed"):
        checkpoint.load(tmp_path / "run", stripe_dirs=[closed])
    with pytest.raises(PermissionError, match="closed"):
        checkpoint.load(tmp_path / "run", stripe_dirs={stripes[0]: closed, stripes[1]: moved[1]})


def test_a_series_is_found_behind_a_directory_that_is_for_other_users(
    tmp_path: Path, stripes: list[Path], closed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.Manager(tmp_path / "run", stripes).save(1, state(1))
    moved = move(stripes, "-moved")
    manager = checkpoint.Manager(tmp_path / "run", [closed, *moved])
    assert manager.steps() == [1]
    assert manager.load()["w1"][0] == state(1)["w1"][0]
    with pytest.raises(FileNotFoundError, match="damaged or unreadable: steps 1"):
        checkpoint.Manager(tmp_path / "run", [closed]).load()
    assert "step-1 is passed over: [Errno 13] Permission denied" in caplog.text
