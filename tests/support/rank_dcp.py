"""Saves of several ranks through torch.distributed.checkpoint; run by ``tests.support.ranks``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint


def save_replicated(rank: int, folder: Path) -> list[str]:
    """Every rank has the one tensor; DCP has one of them write it. The files on disk."""
    dcp_save({"w": torch.arange(9.0)}, storage_writer=checkpoint.dcp.StorageWriter(folder / "step"))
    return sorted(file.name for file in (folder / "step").rglob("*.safetensors"))
