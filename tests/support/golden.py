"""Small checkpoints of each way to save, with an id and a time that are always the same."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
import checkpoint.dcp
from tests.support.rank_managers import Part

UUID = "00c0ffee"
SAVED = 1_700_000_000_000_000_000
WORLD_SIZE = 2


def state() -> dict[str, Any]:
    """A tensor that goes to several stripes, small ones, views of one, and plain values."""
    flat = torch.arange(64.0)
    return {
        "large": torch.full((3, 1 << 20), 7.0),
        "odd": torch.arange(7, dtype=torch.int8),
        "half": flat[:32],
        "turned": flat[:32].view(4, 8).t(),
        "plain": {"step": 3, "name": "golden", "rates": [0.1, None]},
    }


@contextmanager
def always_the_same() -> Iterator[None]:
    """Saves inside have the same id and say that they were made at the same time."""
    with (
        mock.patch.object(secrets, "token_hex", lambda nbytes: UUID * (nbytes // 4)),
        mock.patch.object(time, "time_ns", return_value=SAVED),
    ):
        yield


def save_alone(folder: Path) -> None:
    checkpoint.save(state(), folder / "step")


def save_striped(folder: Path) -> None:
    checkpoint.save(state(), folder / "step", _stripes(folder))


def save_through_dcp(folder: Path) -> None:
    writer = checkpoint.dcp.StorageWriter(folder / "step", _stripes(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp_save(state(), storage_writer=writer, no_dist=True)


def save_by_rank(rank: int, folder: Path) -> None:
    """For ``tests.support.ranks``: a row of which each rank has a part, and what all have."""
    coordinator = checkpoint.GroupCoordinator()
    part = Part(rank, WORLD_SIZE, 5)
    if rank == 0:
        _stripes(folder)
    coordinator.exchange(None)
    stripes = [folder / f"ssd{k}" for k in range(2)]
    with always_the_same():
        checkpoint.save(
            {"part": part, **state()}, folder / "step", stripes, coordinator=coordinator
        )


WAYS: dict[str, Callable[[Path], None]] = {
    "alone": save_alone,
    "striped": save_striped,
    "dcp": save_through_dcp,
}


def files_of(folder: Path) -> dict[str, bytes]:
    """Manifests and data files by their paths; the folder's own name is left out of the first."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found[str(file.relative_to(folder))] = file.read_bytes()
    for file in sorted(folder.rglob("manifest.json")):
        _, _, text = file.read_bytes().partition(b"\n")  # the first line is a sum over the others
        found[str(file.relative_to(folder))] = text.replace(str(folder).encode(), b"FOLDER")
    return found


def _stripes(folder: Path) -> list[Path]:
    stripes = [folder / f"ssd{k}" for k in range(2)]
    for stripe in stripes:
        stripe.mkdir()
    return stripes
