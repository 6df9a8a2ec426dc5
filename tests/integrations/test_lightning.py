"""``OffloadStrategy`` at the least budget beside Lightning in memory: the same bits, and once more
after a kill.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MetricTracker

from infinity.integrations.lightning import OffloadStrategy
from tests.support.lit import BATCHES, KillIn, Lit, Run, fit, least_of
from tests.support.trainers import run_killed
from tests.support.training import same_bits

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:Checkpoint directory",
)


def assert_same(first: Run, second: Run) -> None:
    assert first.seen == second.seen
    assert first.values.keys() == second.values.keys()
    for name, value in first.values.items():
        assert same_bits(value, second.values[name]), name


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({}, {}),
    "sgd": ({"optimizer": "sgd"}, {}),
    "by value": ({}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "manual": ({"manual": True}, {"accumulate_grad_batches": 1, "gradient_clip_val": None}),
    "bf16-mixed": ({"optimizer": "sgd"}, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fit_at_the_least_budget_has_the_bits_of_one_in_memory(
    name: str, nvme: Path, tmp_path: Path
) -> None:
    module, options = VARIANTS[name]
    make = partial(Lit, **module)
    expected = fit(tmp_path / "plain", make=make, **options)
    strategy = OffloadStrategy(nvme, host_memory=least_of(nvme, make))
    assert_same(expected, fit(tmp_path / "ours", strategy, make=make, **options))


def killed_in_the_second_epoch(folder: str, nvme: str, least: int) -> None:
    """In a process of its own."""
    fit(Path(folder), OffloadStrategy(nvme, host_memory=least), callbacks=[KillIn(1)])


def test_a_fit_that_was_killed_goes_on_to_the_same_bits(nvme: Path, tmp_path: Path) -> None:
    least, folder = least_of(nvme), tmp_path / "killed"
    whole = fit(tmp_path / "plain")
    run_killed(f"{__name__}:killed_in_the_second_epoch({str(folder)!r}, {str(nvme)!r}, {least})")
    strategy = OffloadStrategy(nvme, host_memory=least)
    resumed = fit(folder, strategy, resume=folder / "epoch=0.ckpt")
    assert resumed.seen == whole.seen[-len(resumed.seen) :]
    assert_same(Run(resumed.seen, whole.values), resumed)


def test_a_fit_goes_on_to_the_same_bits_from_a_validation_behind_the_last_batch_of_an_epoch(
    nvme: Path, tmp_path: Path
) -> None:
    """The checkpoint is of the epoch that has not ended, and no batch of it is left."""
    options: dict[str, Any] = {"max_epochs": 3, "check_val_every_n_epoch": 2}
    least = least_of(nvme)
    whole = fit(tmp_path, OffloadStrategy(nvme, host_memory=least), **options)
    strategy = OffloadStrategy(nvme, host_memory=least)
    resumed = fit(tmp_path, strategy, resume=tmp_path / "epoch=1.ckpt", **options)
    assert len(resumed.seen) == BATCHES
    assert_same(Run(whole.seen[-BATCHES:], whole.values), resumed)


class Measured(Lit):
    """With metrics of torchmetrics, whose hash is another after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.mean_of_validation = MeanMetric(), MeanMetric()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()  # appends a copy of its metric

    def loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().loss_of(tokens)
        metric = self.mean if self.training else self.mean_of_validation
        self.seen.append(metric(loss).item())
        if self.training:
            self.seen.append(self.tracker(loss).item())
        self.log(f"mean, {self.training}", metric, on_epoch=True)
        return loss


def test_metrics_of_a_module_are_those_in_memory(nvme: Path, tmp_path: Path) -> None:
    expected = fit(tmp_path / "plain", make=Measured)
    strategy = OffloadStrategy(nvme, host_memory=least_of(nvme, Measured))
    assert_same(expected, fit(tmp_path / "ours", strategy, make=Measured))
