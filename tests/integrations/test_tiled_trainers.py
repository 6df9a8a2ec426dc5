"""Trainers of TRL, whose losses take the weight of the head itself, over a head in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.integrations import trl as offloaded_trl
from tests.support.training import values_of
from tests.support.trl_runs import case

SHORT: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_head_in_tiles_is_trained_by_losses_that_take_it_as_it_is(
    tmp_path: Path, nvme: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = []
    more: dict[str, Any] = {"nvme": nvme, "host_memory": "64MiB", "max_parameter_bytes": "256KiB"}
    for offloaded in (False, True):
        kind, given = case(name, tmp_path / str(offloaded), **SHORT)
        if offloaded:
            kind = getattr(offloaded_trl, f"Offload{name}Trainer")
        trainer = kind(**given, **(more if offloaded else {}))
        torch.manual_seed(2)
        trainer.train()
        if offloaded:
            trainer.close()
        values.append(values_of(trainer.model))
    plain, ours = values
    assert "lm_head.weight is in tiles and is used as a whole" in caplog.text
    for key, value in plain.items():
        assert value.allclose(ours[key], atol=1e-4), key
