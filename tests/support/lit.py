"""A Lightning module and a run of it, by the plain trainer or within a budget: accumulation,
clipping, a scheduler, validation, and a checkpoint in the middle.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity.integrations.lightning import OffloadStrategy
from tests.support.models import VOCABULARY, Gpt, seeded
from tests.support.training import values_of

ACCUMULATE = 4
BATCHES = 12
EPOCHS = 2


class Lit(LightningModule):
    """A small GPT; ``manual`` optimisation does what the trainer does otherwise."""

    def __init__(self, optimizer: str = "adamw", manual: bool = False) -> None:
        super().__init__()
        self.gpt = Gpt(width=96, depth=3, dropout=0.1)
        self.chosen = optimizer
        self.automatic_optimization = not manual
        self.seen: list[float] = []

    def loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(tokens).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        loss = self.loss_of(batch[0])
        self.seen.append(loss.item())
        self.log("loss", loss.detach())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / ACCUMULATE)
        if (index + 1) % ACCUMULATE == 0:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()
        return None

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        loss = self.loss_of(batch[0])
        self.seen.append(loss.item())
        self.log("held_out", loss)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss_of(batch[0]))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        logits: torch.Tensor = self.gpt(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer
        if self.chosen == "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def loader(seed: int, count: int) -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, 16), generator=rng)
    return DataLoader(TensorDataset(tokens), batch_size=2)


@dataclass(frozen=True, slots=True)
class Run:
    """Losses by batch, of training and of validation, and the weights in the end."""

    seen: tuple[float, ...]
    values: Mapping[str, torch.Tensor]


class KillIn(Callback):
    """Kills the process, as a power cut would, within an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        if trainer.current_epoch == self._epoch and i == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(folder: Path, strategy: Any, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": 0.5,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, **(chosen | options))


def checkpoints(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, **options)


def fit(
    folder: Path,
    strategy: Any = "auto",
    *,
    make: Callable[[], Lit] = Lit,
    resume: Path | None = None,
    callbacks: Any = (),
    **options: Any,
) -> Run:
    """Train to the end."""
    module = seeded(make)
    saves = checkpoints(folder)
    trainer = trainer_of(folder, strategy, callbacks=[saves, *callbacks], **options)
    held_out = [loader(5, 4), loader(6, 4)]
    torch.manual_seed(3)
    trainer.fit(module, loader(0, 2 * BATCHES), held_out, ckpt_path=resume)
    return Run(tuple(module.seen), values_of(module))


def least_of(nvme: Any, make: Callable[[], Lit] = Lit) -> int:
    """The least budget that ``fit`` works in."""
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    strategy = OffloadStrategy(nvme, host_memory=1)
    trainer = trainer_of(nvme, strategy, enable_checkpointing=False, **options)
    try:
        trainer.fit(seeded(make), loader(0, 4), loader(5, 4))
    except infinity.BudgetError as error:
        return error.least_host_bytes
    raise AssertionError("one byte of host memory was taken for enough")
