"""Trainers of TRL, whose losses take the weight of the head itself, over a head in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from infinity.integrations import trl as offloaded_trl
from infinity.integrations.transformers import OffloadMixin
from tests.support.training import values_of
from tests.support.trl_runs import case

SHORT: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


_known: Any = trl  # which makes its names when they are asked for
_own_trainer: Any = type("Own", (OffloadMixin, type("Mine", (_known.SFTTrainer,), {})), {})
"""Made by hand, as any other trainer is."""


@pytest.mark.parametrize(
    ("name", "made"), [("SFT", "OffloadSFTTrainer"), ("DPO", "OffloadDPOTrainer"), ("SFT", None)]
)
def test_head_in_tiles_is_trained_by_losses_that_take_it_as_it_is(
    tmp_path: Path, nvme: Path, name: str, made: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    values = []
    more: dict[str, Any] = {"nvme": nvme, "host_memory": "64MiB", "max_parameter_bytes": "256KiB"}
    for offloaded in (False, True):
        kind, given = case(name, tmp_path / str(offloaded), **SHORT)
        if offloaded:
            kind = getattr(offloaded_trl, made) if made else _own_trainer
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
