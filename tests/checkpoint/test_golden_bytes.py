"""Every way to save makes the bytes that it always made; what it made then still loads."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

import checkpoint
from tests.checkpoint.trees import assert_same
from tests.support import golden
from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"


def unpacked(way: str, folder: Path) -> Path:
    """The files of a way to save as they were on disk."""
    for packed in (GOLDEN / way).rglob("*.gz"):
        file = folder / packed.relative_to(GOLDEN / way).with_suffix("")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


def assert_same_files(found: Path, expected: Path) -> None:
    mine, theirs = golden.files_of(found), golden.files_of(expected)
    assert list(mine) == list(theirs)
    for name, content in theirs.items():
        text = content.replace(b"/golden", b"FOLDER") if name.endswith(".json") else content
        assert mine[name] == text, name


@pytest.mark.parametrize("way", golden.WAYS)
def test_a_save_makes_the_bytes_that_it_always_made(tmp_path: Path, way: str) -> None:
    (tmp_path / "now").mkdir()
    with golden.always_the_same():
        golden.WAYS[way](tmp_path / "now")
    assert_same_files(tmp_path / "now", unpacked(way, tmp_path / "then"))


def test_several_ranks_make_the_bytes_that_they_always_made(tmp_path: Path) -> None:
    run_ranks(golden.save_by_rank, tmp_path / "now", golden.WORLD_SIZE)
    assert_same_files(tmp_path / "now", unpacked("ranks", tmp_path / "then"))


@pytest.mark.parametrize("way", [*golden.WAYS, "ranks"])
def test_what_was_saved_then_loads_from_where_it_is_now(tmp_path: Path, way: str) -> None:
    folder = unpacked(way, tmp_path)
    stripes = sorted(folder.glob("ssd*")) or None
    loaded = checkpoint.load(folder / "step", stripe_dirs=stripes)
    if way == "ranks":
        assert torch.equal(loaded.pop("part"), torch.full((100_000,), 5))
    assert_same(golden.state(), loaded)
    assert checkpoint.verify(folder / "step", stripe_dirs=stripes).ok
