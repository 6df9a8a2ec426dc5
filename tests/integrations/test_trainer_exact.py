"""``OffloadTrainer`` at the least budget beside ``Trainer`` in memory: the same bits, and the same
again after a kill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from infinity.integrations.transformers import OffloadArguments, OffloadTrainer
from tests.support.compatibility import assert_documented, row
from tests.support.trainers import (
    KillAt,
    Run,
    arguments,
    assert_same,
    least_of,
    run_killed,
    some_texts,
    state_bytes_of,
    tiny_llama,
    train,
)
from tests.support.training import WHOLE, same_bits


def _least(args: Any, nvme: Path) -> int:
    return least_of(OffloadTrainer, model=tiny_llama(), args=args, nvme=nvme, **some_texts())


def _offloaded(nvme: Path, folder: Path, *, least: bool = True, **options: Any) -> Run:
    """Trained within the least budget, or within one that holds everything."""
    resume = options.pop("resume", None)
    args = arguments(folder, **options)
    host_memory = _least(args, nvme) if least else WHOLE
    return train(OffloadTrainer, args, resume=resume, nvme=nvme, host_memory=host_memory)


def test_trainer_at_the_least_budget_has_the_losses_and_weights_of_one_in_memory(
    tmp_path: Path, nvme: Path
) -> None:
    plain = train(Trainer, arguments(tmp_path / "plain", max_grad_norm=0.5))
    offloaded = _offloaded(nvme, tmp_path / "offloaded", max_grad_norm=0.5)
    assert_same(plain, offloaded)
    assert len([entry for entry in plain.logged if entry.get("grad_norm", 0.0) > 0.5]) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 0.5, "bf16": True},
        {"optim": "adafactor"},
        {"optim": "sgd", "activation_checkpointing": True},
        {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_trainer_gives_the_same_under_every_budget(
    tmp_path: Path, nvme: Path, options: dict[str, Any]
) -> None:
    more = options | {"save_strategy": "no", "max_steps": 3}
    ample = _offloaded(nvme, tmp_path / "ample", least=False, **more)
    assert_same(ample, _offloaded(nvme, tmp_path / "least", **more))


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adagrad"])
def test_trainer_with_an_optimizer_of_torch_is_that_in_memory(
    tmp_path: Path, nvme: Path, optimizer: str
) -> None:
    options: dict[str, Any] = {
        "optim": optimizer,
        "save_strategy": "no",
        "max_steps": 3,
        "learning_rate": 1e-3,
    }
    plain = train(Trainer, arguments(tmp_path / "plain", **options))
    offloaded = _offloaded(nvme, tmp_path / "offloaded", **options)
    assert_same(plain, offloaded, except_logged=("grad_norm",))


def killed_at_step_5(folder: str, nvme: str, host_memory: int) -> None:
    """In a process of its own: two checkpoints are saved by then."""
    args = arguments(Path(folder), max_grad_norm=0.5)
    train(OffloadTrainer, args, nvme=nvme, host_memory=host_memory, callbacks=[KillAt(5)])


def test_trainer_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path, nvme: Path) -> None:
    whole = _offloaded(nvme, tmp_path / "whole", max_grad_norm=0.5)
    folder = tmp_path / "killed"
    least = _least(arguments(folder), nvme)
    run_killed(f"{__name__}:killed_at_step_5({str(folder)!r}, {str(nvme)!r}, {least})")
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    resumed = _offloaded(nvme, folder, max_grad_norm=0.5, resume=True)
    assert_same(whole, resumed)
    state = state_bytes_of(tiny_llama())
    assert_documented(row("`Trainer`", "transformers", least_bytes=least, state_bytes=state))


def test_checkpoint_is_what_from_pretrained_loads(tmp_path: Path, nvme: Path) -> None:
    run = _offloaded(nvme, tmp_path / "run", max_steps=2)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    for name, parameter in loaded.named_parameters():
        assert same_bits(parameter, run.values[name]), name
    assert loaded.generation_config.pad_token_id == 2


def test_arguments_hold_the_options_of_offload(tmp_path: Path, nvme: Path) -> None:
    args = arguments(
        tmp_path / "run",
        OffloadArguments,
        nvme=str(nvme),
        host_memory="64MiB",
        compute_dtype=torch.bfloat16,
        state_dtype="uint8",
        max_steps=1,
        save_strategy="no",
    )
    assert train(OffloadTrainer, args).logged
    assert args.to_dict()["compute_dtype"] == "bfloat16"
