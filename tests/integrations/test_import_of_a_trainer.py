"""A checkpoint of transformers' Trainer in memory, whose optimizer numbers its parameters by groups
with and without decay, goes on by their names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import checkpoint
from infinity.cli import main
from infinity.integrations.transformers import OffloadTrainer
from tests.support.families import FAMILIES
from tests.support.trainers import arguments, some_texts, tiny_llama, train


def tiny_mixtral() -> Any:
    """Whose experts have other names in files than in the model."""
    torch.manual_seed(0)
    return next(family for family in FAMILIES if family.name == "Mixtral").make()


@pytest.mark.parametrize("make", [tiny_llama, tiny_mixtral])
def test_state_of_a_plain_trainer_is_imported_by_names(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, max_steps=2, save_steps=2),
        **some_texts(),
    )
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    words = ["import", folder / "optimizer.pt", tmp_path / "ours", "--model", folder]
    assert main([str(word) for word in words]) == 0
    ours = checkpoint.load(tmp_path / "ours")
    optimizer: Any = trainer.optimizer
    state = optimizer.optimizer.state
    assert len(state) > 4
    for name, parameter in model.named_parameters():
        assert torch.equal(ours["model"][name], parameter)
        for part in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours["optimizer"][part][name], state[parameter][part]), name
    assert set(ours["infinity"]["steps"].values()) == {2}
    kept, free = ours["infinity"]["groups"]
    assert not any("norm" in name for name in kept["params"])
    assert all("norm" in name for name in free["params"])


def test_offloading_trainer_goes_on_from_a_plain_one(tmp_path: Path, nvme: Path) -> None:
    args = arguments(tmp_path / "plain", optim="adamw_torch_fused")
    plain = train(transformers.Trainer, args)
    folder = tmp_path / "plain" / "checkpoint-2"
    words = ["import", folder / "optimizer.pt", folder / "infinity", "--model", folder]
    assert main([str(word) for word in words]) == 0
    again = arguments(tmp_path / "ours")
    ours = train(OffloadTrainer, again, resume=str(folder), nvme=nvme, host_memory="256MiB")
    for name, value in plain.values.items():
        assert torch.equal(value, ours.values[name]), name
