"""What the handle of an offloaded model shows: what users call, and nothing else."""

import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity import OffloadedModel

CALLED_BY_USERS = {
    *("backward", "clip_grad_norm_", "export", "flush", "gathered", "grad_norm", "gradient"),
    *("load", "loss_scale", "model", "optimizer", "report", "save", "step", "trace"),
    *("snapshot", "snapshots", "restore", "drop_snapshot"),
}


def test_the_handle_shows_only_what_users_call() -> None:
    shown = {name for name in vars(OffloadedModel) if not name.startswith("_")}
    assert shown == CALLED_BY_USERS


def test_what_would_do_nothing_cannot_be_set_on_the_handle(tmp_path: Path) -> None:
    with infinity.offload(nn.Linear(8, 8), nvme=tmp_path, max_grad_norm=1.0) as offloaded:
        handle: Any = offloaded
        with pytest.raises(AttributeError, match="max_grad_norm"):
            handle.max_grad_norm = 2.0
        assert weakref.ref(handle)() is handle
