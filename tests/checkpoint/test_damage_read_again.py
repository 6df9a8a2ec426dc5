"""Damage is known until all of what was saved was read, by whatever load."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.watched_loads import WatchedLoads
from tests.checkpoint.test_known_damage import break_file
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    checkpoint.Manager(tmp_path).save(1, {"w": torch.ones(4)})
    return tmp_path


VALUES = {"w": torch.ones(4), "v": torch.arange(6.0).view(2, 3), "none": torch.zeros(0)}
READS: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {
    "all": (True, dict),
    "all patterns": (True, lambda: {"only": ["w", "v", "n*"]}),
    "into": (True, lambda: {"into": {name: value.clone() for name, value in VALUES.items()}}),
    "into, converted": (
        True,
        lambda: {"into": {n: v.bfloat16() for n, v in VALUES.items()}, "dtype": torch.bfloat16},
    ),
    "a tensor": (False, lambda: {"only": ["w"]}),
    "into a part": (False, lambda: {"into": {"v": torch.zeros(2, 3)}}),
    "unverified": (False, lambda: {"verify": False}),
    "into, unverified": (False, lambda: {"into": READS["into"][1]()["into"], "verify": False}),
}


@pytest.mark.parametrize("read", READS)
def test_a_step_that_could_not_be_read_counts_when_all_of_it_was_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """It may be a sector that is gone, and then the sound step must not go for it."""
    manager = checkpoint.Manager(root, keep=2)
    manager.save(2, VALUES)
    (file,) = manager.path(2).rglob("*.safetensors")
    with monkeypatch.context() as patch:
        break_file(patch, file, errno.EIO)
        assert manager.load()["w"][0] == 1
        assert manager.loaded == checkpoint.LoadedStep(1, (2,))
    manager.save(3, {"w": torch.zeros(4)})
    assert manager.steps() == [1, 2, 3]
    is_all, options = READS[read]
    manager.load(2, **options())
    assert WatchedLoads(KnownManifests()).was_damaged(manager.path(2)) is not is_all
    manager.save(4, {"w": torch.zeros(4)})
    assert manager.steps() == ([3, 4] if is_all else [2, 3, 4])
