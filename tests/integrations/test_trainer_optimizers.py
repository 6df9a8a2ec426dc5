"""Optimizers and schedulers that a program gives to an ``OffloadTrainer``, or makes in a class of
its own that derives from it: taken over, with the bits that they have in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import Adafactor, LlamaForCausalLM, Trainer
from transformers.optimization import AdafactorSchedule

from infinity.integrations.transformers import OffloadTrainer
from tests.support.trainers import Run, arguments, assert_same, logged_by, some_texts, tiny_llama
from tests.support.training import values_of

BUDGET = "24MiB"


def _groups(model: Any) -> list[dict[str, Any]]:
    """Heads with a rate of their own."""
    heads = list(model.lm_head.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]
    return [{"params": rest}, {"params": heads, "lr": 3e-3, "weight_decay": 0.0}]


def _adamw(model: LlamaForCausalLM) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2, betas=(0.8, 0.95), fused=True)
    return optimizer, lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)


def _sgd(model: LlamaForCausalLM) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(_groups(model), lr=1e-2, momentum=0.9)
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    return optimizer, lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])


def _adagrad(model: LlamaForCausalLM) -> tuple[Any, Any]:
    """Which has state before its first step."""
    return torch.optim.Adagrad(_groups(model), lr=1e-2, initial_accumulator_value=0.1), None


def _alone(model: LlamaForCausalLM) -> tuple[Any, Any]:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), None


def _nothing(model: LlamaForCausalLM) -> tuple[Any, Any]:
    return None, None


def _given(kind: Any, folder: Path, make: Any, *, trainings: int = 1, **more: Any) -> Run:
    model = tiny_llama()
    args = arguments(folder, max_steps=3, save_strategy="no")
    trainer = kind(model, args, **some_texts(), optimizers=make(model), **more)
    for _ in range(trainings):
        trainer.train()
    logged = logged_by(trainer)
    if isinstance(trainer, OffloadTrainer):
        trainer.close()
    return Run(logged, values_of(model))


@pytest.mark.parametrize("make", [_adamw, _sgd, _adagrad, _alone])
def test_optimizer_and_scheduler_that_are_given_are_those_in_memory(
    tmp_path: Path, nvme: Path, make: Any
) -> None:
    plain = _given(Trainer, tmp_path / "plain", make)
    offloaded = _given(OffloadTrainer, tmp_path / "offloaded", make, nvme=nvme, host_memory=BUDGET)
    assert_same(plain, offloaded, except_logged=("grad_norm",))


def test_given_optimizer_goes_on_in_a_second_training(tmp_path: Path, nvme: Path) -> None:
    plain = _given(Trainer, tmp_path / "plain", _adamw, trainings=2)
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET, "trainings": 2}
    offloaded = _given(OffloadTrainer, tmp_path / "offloaded", _adamw, **more)
    assert_same(plain, offloaded, except_logged=("grad_norm",))


def test_rates_of_a_given_optimizer_are_in_it_after_closing(tmp_path: Path, nvme: Path) -> None:
    model = tiny_llama()
    optimizer, scheduler = _adamw(model)
    args = arguments(tmp_path / "run", max_steps=2, save_strategy="no", eval_strategy="no")
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    data = some_texts()
    with OffloadTrainer(model, args, optimizers=(optimizer, scheduler), **data, **more) as trainer:
        trainer.train()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == scheduler.get_last_lr() != [1e-2, 3e-3]


class _OwnOptimizer(Trainer):
    """As documentation of transformers says to do it."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = _groups(self.model if model is None else model)
            self.optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.5)
        return self.optimizer


class _OwnOptimizerOffloaded(OffloadTrainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = _groups(self.model if model is None else model)
            self.optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.5)
        made: torch.optim.Optimizer = self.optimizer
        return made


def test_optimizer_of_a_class_that_derives_is_taken_over(tmp_path: Path, nvme: Path) -> None:
    plain = _given(_OwnOptimizer, tmp_path / "plain", _nothing)
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    offloaded = _given(_OwnOptimizerOffloaded, tmp_path / "offloaded", _nothing, **more)
    assert_same(plain, offloaded, except_logged=("grad_norm",))


def test_optimizer_of_a_part_of_the_model_is_refused(tmp_path: Path, nvme: Path) -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.lm_head.parameters())
    args = arguments(tmp_path / "run", eval_strategy="no")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is in no group of the optimizer"):
        OffloadTrainer(model, args, optimizers=(optimizer, None), nvme=nvme)


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
def test_scheduler_of_another_optimizer_is_refused(
    tmp_path: Path, nvme: Path, is_alone: bool
) -> None:
    model = tiny_llama()
    optimizer = None if is_alone else torch.optim.AdamW(model.parameters())
    _, scheduler = _adamw(model)
    args = arguments(tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizers=.*StepLR .* lr_scheduler_type="):
        OffloadTrainer(model, args, optimizers=(optimizer, scheduler), nvme=nvme)


def test_schedule_that_reads_an_optimizer_in_memory_is_refused(tmp_path: Path, nvme: Path) -> None:
    model = tiny_llama()
    optimizer = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
    given = (optimizer, AdafactorSchedule(optimizer))
    with pytest.raises(ValueError, match=r"AdafactorSchedule.*relative_step=False"):
        OffloadTrainer(model, arguments(tmp_path / "run"), optimizers=given, nvme=nvme)
