"""The programs of docs/INTEGRATIONS.md run as they stand, on a folder for the SSD."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import checkpoint
from tests.contract.test_documents import ROOT
from tests.support import accelerated
from tests.support.models import seeded
from tests.support.trainers import arguments, texts, tiny_llama
from tests.support.training import values_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:The number of training batches",
    "ignore:Starting from v1.9.0",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with accelerated.fresh_accelerate():
        yield


def programs() -> dict[str, str]:
    """The first block of Python under each heading."""
    parts = re.split(r"^## (.*)$", (ROOT / "docs" / "INTEGRATIONS.md").read_text(), flags=re.M)
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        if block is not None and not re.search("transformers|trl", block[1]):
            found[heading] = block[1]
    return found


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.inner(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))


@pytest.mark.parametrize("name", programs())
def test_program_of_the_guide_trains(name: str, nvme: Path, tmp_path: Path) -> None:
    model, module = _model(), Module()
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(16, size, generator=rng) for size in (64, 1)))
    before = values_of(model) | values_of(module)
    names = {"model": model, "module": module, "loader": DataLoader(data, batch_size=2)}
    exec(_placed(programs()[name], nvme, tmp_path), names)
    after = values_of(model) | values_of(module)
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
    assert all(value.isfinite().all() for value in after.values())


def test_resuming_as_the_guide_says_goes_on_with_the_draws_that_came_next(
    nvme: Path, tmp_path: Path
) -> None:
    batch = torch.zeros(2, 64), torch.zeros(2, 1)
    names: dict[str, Any] = {"model": _model(), "loader": [batch]}
    train, _, resume = _placed(programs()["Resuming a plain loop"], nvme, tmp_path).rpartition(
        "\nwith "
    )
    exec(train, names)
    drawn = random.random(), numpy.random.rand(), torch.rand(1)
    exec(f"with {resume}", names)
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == drawn


def test_trainer_of_the_guide_begins_in_an_empty_folder_and_goes_on(
    nvme: Path, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "INTEGRATIONS.md").read_text()
    found = re.search(r"## transformers\n\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    resumed = found[1].replace(".train()", ".train(resume_from_checkpoint=True)")
    for program, steps in ((found[1], 2), (resumed, 4)):
        args = arguments(tmp_path / "run", max_steps=steps)
        names = {"model": tiny_llama(), "args": args, "train": texts(64), "held_out": texts(4)}
        exec(_placed(program, nvme, tmp_path), names)
        names["trainer"].close()
        assert names["trainer"].state.global_step == steps
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
    }


def _placed(program: str, nvme: Path, folder: Path) -> str:
    return program.replace("/mnt/nvme0/run", f"{folder}/run").replace("/mnt/nvme0", str(nvme))


def test_weights_of_a_lightning_checkpoint_are_read_as_the_guide_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "INTEGRATIONS.md").read_text()
    read = re.search(r"```python\n(import checkpoint\n.*?)```", text, re.DOTALL)
    assert read is not None
    state = {"model": {"a": torch.ones(3)}, "infinity": {"steps": 1}}
    checkpoint.save(state, tmp_path / "run" / "last.ckpt" / "infinity")
    names: dict[str, Any] = {}
    exec(_placed(read[1], tmp_path, tmp_path), names)
    assert torch.equal(names["weights"]["a"], torch.ones(3))
