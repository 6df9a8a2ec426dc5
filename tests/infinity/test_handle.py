"""What the handle of an offloaded model shows: what users call, and nothing else."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import checkpoint
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


def test_comparisons_of_numpy_are_flags(tmp_path: Path) -> None:
    steps = np.arange(2)
    is_not: Any = steps[0] == steps[1]
    is_so: Any = steps[1] == steps[1]
    model = nn.Linear(8, 8)
    options: Any = {"verify_swap": is_so, "overlap": is_not}
    with infinity.offload(model, tmp_path, **options) as offloaded:
        offloaded.snapshot("last", block=is_not).result()
        offloaded.save(tmp_path / "run", block=is_so, only_trainable=is_not)
        offloaded.save(tmp_path / "run", block=is_not).result()
        with offloaded.gathered(modify=is_so):
            nn.init.ones_(model.weight)
    assert (model.weight == 1).all()
    loaded = checkpoint.load(tmp_path / "run", verify=is_so, strict=is_not)
    assert loaded["model"]["weight"].shape == (8, 8)


def test_parameters_that_are_in_no_list_are_refused_and_told_where_they_go(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    second: Any = model.bias
    refused = pytest.raises(TypeError, match=r"^modify is a .*, not True or False; .* in a list$")
    with infinity.offload(model, tmp_path) as offloaded, refused:
        offloaded.gathered(model.weight, second)
