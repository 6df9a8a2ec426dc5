"""Byte sources that say where their bytes lie: written from there, and looked at meanwhile."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.tensors.held import HeldSource
from checkpoint.transfer.writer import _Stream

MIB = 1 << 20


class _Lying(HeldSource):
    """Whole pages of memory; ``tells_all`` as given."""

    dtype = torch.uint8

    def __init__(self, nbytes: int, *, tells_all: bool) -> None:
        self.values = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.shape = (nbytes,)
        self.is_mine = True
        self._tells_all = tells_all

    @property
    def address(self) -> int | None:
        return self.values.ctypes.data

    @property
    def tells_all(self) -> bool:
        return self._tells_all

    def is_there(self) -> bool:
        return self.is_mine

    def changed(self, name: str) -> checkpoint.ChangedTensorError:
        return checkpoint.ChangedTensorError(name, "leave it")

    def read(self, start: int, out: memoryview) -> None:
        raise AssertionError("it says where its bytes lie")

    def check_unchanged(self) -> None:
        """Nothing is counted."""

    def check_ended(self) -> None:
        """Nor is this."""


@pytest.mark.parametrize("tells_all", [False, True])
@pytest.mark.parametrize("nbytes", [5000, 3 * MIB + 5000, 33 * MIB])
def test_source_that_says_where_its_bytes_lie_is_saved_from_there(
    nbytes: int, tells_all: bool, tmp_path: Path
) -> None:
    source = _Lying(nbytes, tells_all=tells_all)
    source.values[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    checkpoint.save({"x": source, "y": torch.ones(3)}, tmp_path / "run", staging_bytes=64 << 10)
    loaded = checkpoint.load(tmp_path / "run")
    assert np.array_equal(loaded["x"].numpy(), source.values)
    assert loaded["y"].tolist() == [1.0] * 3


def _on_first_write(monkeypatch: pytest.MonkeyPatch, then: Callable[[], Any]) -> None:
    """What comes behind the sum of a source and before its write is known to have ended."""
    finish, first = _Stream._finish, [then]

    def finished(stream: Any, flying: Any) -> None:
        if flying.buffer is None and first:
            first.pop()()
        finish(stream, flying)

    monkeypatch.setattr(_Stream, "_finish", finished)


@pytest.mark.parametrize("tells_all", [False, True])
def test_source_that_tells_of_a_change_while_it_is_written_is_an_error(
    tells_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _Lying(4 * MIB, tells_all=tells_all)
    checkpoint.save({"x": source}, tmp_path / "run")
    before = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    _on_first_write(monkeypatch, lambda: setattr(source, "is_mine", False))
    with pytest.raises(checkpoint.ChangedTensorError, match=r"'x' was changed.*leave it"):
        checkpoint.save({"x": source}, tmp_path / "run")
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == before


def test_source_that_tells_not_all_is_summed_again_when_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _Lying(4 * MIB, tells_all=False)
    checkpoint.save({"x": source}, tmp_path / "run")
    _on_first_write(monkeypatch, lambda: source.values.fill(7))
    with pytest.raises(checkpoint.ChangedTensorError, match=r"'x' was changed.*leave it"):
        checkpoint.save({"x": source}, tmp_path / "run")
    assert not checkpoint.load(tmp_path / "run")["x"].any()
