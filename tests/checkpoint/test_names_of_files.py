"""Paths in JSON that no file can have are refused, or passed over where damaged lists are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aio.process.absence import is_name
from checkpoint.directory.owners import opened_directory, read_owner
from checkpoint.directory.stripe_list import ListedStripe, listed_stripes
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.manifest import decode_manifest
from tests.checkpoint.test_hostile import sign

UUID = "00c0ffee"
HALF = "/nowhere\ud800"
"""With half of a character, which UTF-8 does not have."""


def test_names_that_files_have_are_told_from_those_that_none_has() -> None:
    assert is_name("/a/é")
    assert is_name(os.fsdecode(b"/not/utf-8/\xff"))
    assert not is_name(HALF)
    assert not is_name("/a\0b")


def test_list_of_stripes_with_a_name_that_no_file_has_gives_the_others(tmp_path: Path) -> None:
    names = [f"{HALF}/x.{UUID}", f"/nowhere/x.{UUID}"]
    (tmp_path / "stripes.json").write_text(json.dumps(names))
    assert listed_stripes(tmp_path, UUID) == [ListedStripe(Path(names[1]), None)]


def test_owner_with_a_name_that_no_file_has_is_none(tmp_path: Path) -> None:
    told = {"stripes": f"{HALF}/stripes.json", "inode": 1, "changed": 2}
    (tmp_path / "owner.json").write_text(json.dumps(told))
    with opened_directory(tmp_path) as directory:
        assert directory is not None
        assert read_owner(directory) is None


@pytest.mark.parametrize(
    ("root", "path"), [(HALF, f"x.{UUID}"), ("/nowhere", f"x\ud800.{UUID}")], ids=["root", "path"]
)
def test_manifest_with_a_name_that_no_file_has_is_refused(root: str, path: str) -> None:
    file = {"root": 0, "path": f"{path}/r0-0.safetensors", "nbytes": 4096}
    document = {
        "format": "infinity-checkpoint",
        "version": 1,
        "uuid": UUID,
        "world_size": 1,
        "roots": [root],
        "storages": [],
        "tensors": [],
        "tree": None,
        "files": [{**file, "header_nbytes": 4096, "header_crc32c": "00000000"}],
    }
    with pytest.raises(CorruptCheckpointError, match=r"absolute path|path of a data file"):
        decode_manifest(sign(json.dumps(document)[1:].encode()))
