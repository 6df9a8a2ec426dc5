"""Attributes that cannot be given fail no save, and nobody reads more for it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from aio import File
from checkpoint.directory.files import attributes
from checkpoint.directory.files.attributes import Attributes, shared_attributes
from checkpoint.directory.files.replacing import replace_durably
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

STATE = {"a": torch.ones(64), "b": torch.zeros(64)}
USER, GROUP = 4001, 4002


def _stream(path: Path) -> None:
    path.mkdir(exist_ok=True)
    with checkpoint.open_stream(path / "file", "wb") as stream:
        stream.write(b"x")


def _text(path: Path) -> None:
    path.mkdir(exist_ok=True)
    replace_durably(path / "file", b"x")


WAYS: dict[str, Callable[[Path], object]] = {
    "save": lambda path: checkpoint.save(STATE, path),
    "export": lambda path: checkpoint.write_safetensors(STATE, path),
    "stream": _stream,
    "text": _text,
}
every_way = pytest.mark.parametrize("way", WAYS)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}


class Owners:
    """Stands for the calls that change attributes: all files are of these, those made anew too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user, self.group, self.mode = 0, 0, 0
        """Errors of giving a user, a group, permissions; 0 for none."""
        self.given: dict[int, list[int]] = {}
        self._chmod = os.fchmod
        monkeypatch.setattr(os, "fchown", self._give)
        monkeypatch.setattr(os, "fchmod", self._set)
        monkeypatch.setattr(attributes, "_told", {})
        monkeypatch.setattr(Attributes, "of", classmethod(_of_others))

    def _give(self, number: int, user: int, group: int) -> None:
        if user != -1:
            _raise(self.user)
        if group != -1:
            _raise(self.group)
        mine = self.given.setdefault(os.fstat(number).st_ino, [0, 0])
        mine[0], mine[1] = (mine[0] if user == -1 else user), (mine[1] if group == -1 else group)

    def _set(self, number: int, mode: int) -> None:
        _raise(self.mode)
        if self.given.get(os.fstat(number).st_ino, [0, 0])[0]:
            raise PermissionError(errno.EPERM, "it is another's by now")
        self._chmod(number, mode)


def _of_others(kind: type[Attributes], status: os.stat_result) -> Attributes:
    return kind(USER, GROUP, stat.S_IMODE(status.st_mode))


def _raise(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Owners:
    return Owners(monkeypatch)


CODES = [errno.EPERM, errno.EINVAL, errno.EIO, errno.EOPNOTSUPP]


def _again(way: str, path: Path, mode: int) -> set[int]:
    """The permissions that files have which replace some that had these."""
    WAYS[way](path)
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(mode)
    WAYS[way](path)
    return modes(path)


@every_way
@pytest.mark.parametrize("code", CODES)
def test_a_group_is_given_where_the_user_cannot_be(
    tmp_path: Path, owners: Owners, way: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    owners.user = code
    assert _again(way, tmp_path / "it", 0o640) == {0o640}
    assert [0, GROUP] in owners.given.values()
    assert not [one for one in caplog.records if one.name == attributes.logger.name]


@every_way
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("before", "after"), [(0o640, 0o600), (0o664, 0o644), (0o604, 0o600), (0o644, 0o644)]
)
def test_another_group_gets_no_more_than_all_others_had(
    tmp_path: Path, owners: Owners, way: str, code: int, before: int, after: int
) -> None:
    owners.group = code
    assert _again(way, tmp_path / "it", before) == {after}


@every_way
def test_permissions_are_given_by_who_may_give_them_no_more_when_the_owner_has_changed(
    tmp_path: Path, owners: Owners, way: str
) -> None:
    assert _again(way, tmp_path / "it", 0o640) == {0o640}
    assert [USER, GROUP] in owners.given.values()


@every_way
@pytest.mark.parametrize("code", CODES)
def test_files_whose_permissions_cannot_be_given_are_private(
    tmp_path: Path, owners: Owners, way: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    owners.mode = code
    assert _again(way, tmp_path / "it", 0o664) == {0o600}
    said = [record.getMessage() for record in caplog.records]
    assert sum("has permissions 0600, and what it replaces had 0664" in one for one in said) == 1


def _reads(user: str, groups: set[str], owner: str, group: str, mode: int) -> int:
    """What a user may do with a file."""
    shift = 6 if user == owner else 3 if group in groups else 0
    return mode >> shift & 7


@pytest.mark.parametrize(("user", "group"), list(product([False, True], repeat=2)))
def test_nobody_has_more_of_a_file_with_another_owner(user: bool, group: bool) -> None:
    owner, members = ("new" if user else "old"), ("others" if group else "group")
    for mode in range(0o1000):
        given = Attributes(1, 2, mode).with_other_owner(user=user, group=group)
        for name, groups in product(("old", "any"), (set(), {"group"}, {"others"})):
            had = _reads(name, groups, "old", "group", mode)
            has = _reads(name, groups, owner, members, given)
            assert not has & ~had


def test_what_files_share_is_no_more_than_each_gives() -> None:
    both = [Attributes(1, 2, 0o660), Attributes(1, 2, 0o444)]
    assert shared_attributes(both) == Attributes(1, 2, 0o440)
    assert shared_attributes([*both, Attributes(1, 3, 0o664)]) == Attributes(1, None, 0o400)
    assert shared_attributes([both[0], Attributes(3, 2, 0o660)]) == Attributes(None, 2, 0o660)
    assert shared_attributes([]) is None


def test_shards_of_other_names_have_what_all_that_were_there_had(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(1024) for name in "abcdef"}
    first = checkpoint.write_safetensors(tensors, tmp_path, max_shard_bytes=3 * 4096)
    first[0].chmod(0o660)
    first[1].chmod(0o444)
    files = checkpoint.write_safetensors(tensors, tmp_path, max_shard_bytes=2 * 4096)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files[:-1]} == {0o440}


@pytest.mark.parametrize("way", ["stream", "text"])
def test_attributes_are_durable_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """They are given before the file is synced."""
    seen: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            seen.append(name)
            return call(*arguments)

        return noted

    WAYS[way](tmp_path / "it")
    monkeypatch.setattr(os, "fchmod", noting("given", os.fchmod))
    monkeypatch.setattr(os, "fsync", noting("synced", os.fsync))
    monkeypatch.setattr("aio.File.sync", noting("synced", File.sync))
    WAYS[way](tmp_path / "it")
    assert seen[0] == "given"
    assert "synced" in seen[1:]
