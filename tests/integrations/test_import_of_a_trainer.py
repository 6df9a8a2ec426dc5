"""A checkpoint of transformers' Trainer in memory, whose optimizer numbers its parameters by groups
with and without decay, goes on by their names.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

import checkpoint
from infinity.cli import main
from tests.support.trainers import arguments, some_texts, tiny_llama


def test_state_of_a_plain_trainer_is_imported_by_names(tmp_path: Path) -> None:
    model = tiny_llama()
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
