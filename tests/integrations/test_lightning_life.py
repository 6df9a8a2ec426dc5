"""What a Lightning trainer does with an offloaded module beside training, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO
from torchmetrics import CatMetric, MeanMetric

import checkpoint
from infinity.integrations.lightning import STATE, OffloadStrategy
from tests.support.lit import Lit, checkpoints, fit, least_of, loader, trainer_of
from tests.support.models import seeded
from tests.support.training import WHOLE, same_bits, values_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:Checkpoint directory",
    "ignore:Be aware that when using `ckpt_path`",
)


def _trainer(folder: Path, nvme: Path, **options: Any) -> Trainer:
    strategy = OffloadStrategy(nvme, host_memory=least_of(nvme))
    return trainer_of(folder, strategy, **options)


def test_validate_test_and_predict_give_what_they_give_in_memory(
    nvme: Path, tmp_path: Path
) -> None:
    def results(trainer: Trainer) -> Any:
        module = seeded(Lit)
        return (
            trainer.validate(module, loader(5, 4), verbose=False),
            trainer.test(module, loader(6, 4), verbose=False),
            trainer.predict(module, loader(7, 4)),
        )

    plain = results(trainer_of(tmp_path, "auto", enable_checkpointing=False))
    ours = results(_trainer(tmp_path, nvme, enable_checkpointing=False))
    assert plain[:2] == ours[:2]
    assert all(map(same_bits, plain[2], ours[2]))


def test_best_weights_are_tested_and_old_checkpoints_removed(nvme: Path, tmp_path: Path) -> None:
    module = seeded(Lit)
    saves = checkpoints(tmp_path / "saved", monitor="held_out")
    saves.save_top_k = 1
    trainer = _trainer(tmp_path, nvme, callbacks=[saves])
    trainer.fit(module, loader(0, 24), loader(5, 4))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [
        Path(saves.best_model_path).name
    ]
    best = trainer.test(module, loader(5, 4), ckpt_path="best", verbose=False)
    found = checkpoint.load(Path(saves.best_model_path) / STATE, only=["model.*"])["model"]
    assert all(same_bits(value, found[name]) for name, value in module.named_parameters())
    assert best[0]["test"] == pytest.approx(float(saves.best_model_score or 0), rel=1e-6)


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_weights_of_a_checkpoint_are_evaluated_and_random_numbers_go_on(
    run: str, nvme: Path, tmp_path: Path
) -> None:
    module, saves = seeded(Lit), checkpoints(tmp_path / "saved")
    trainer = _trainer(tmp_path, nvme, callbacks=[saves], max_epochs=1)
    trainer.fit(module, loader(0, 16), loader(5, 4))
    folder = tmp_path / "saved" / "epoch=0.ckpt"
    drawn = []
    for given in (None, folder):
        torch.manual_seed(77)
        getattr(trainer, run)(module, loader(6, 4), ckpt_path=given)
        drawn.append(torch.rand(2))
    assert torch.equal(*drawn)


def test_weights_alone_are_saved_and_loaded(nvme: Path, tmp_path: Path) -> None:
    saves = checkpoints(tmp_path / "saved", save_weights_only=True)
    module = seeded(Lit)
    trainer = _trainer(tmp_path, nvme, callbacks=[saves], max_epochs=1)
    trainer.fit(module, loader(0, 16), loader(5, 4))
    folder = tmp_path / "saved" / "epoch=0.ckpt"
    assert {path.name for path in folder.iterdir()} == {"checkpoint.ckpt", "weights"}
    expected = trainer.test(module, loader(6, 4), verbose=False)
    other = Lit()
    found = _trainer(tmp_path, nvme).test(other, loader(6, 4), ckpt_path=folder, verbose=False)
    assert found == expected
    assert all(
        same_bits(value, values_of(module)[name]) for name, value in values_of(other).items()
    )


def test_weights_of_a_plain_checkpoint_are_taken_and_its_optimizer_is_refused(
    nvme: Path, tmp_path: Path
) -> None:
    fit(tmp_path / "plain", max_epochs=1)
    path = tmp_path / "plain" / "epoch=0.ckpt"
    options: dict[str, Any] = {"ckpt_path": path, "verbose": False}
    plain = trainer_of(tmp_path, "auto", enable_checkpointing=False)
    ours = _trainer(tmp_path, nvme, enable_checkpointing=False)
    expected = plain.test(Lit(), loader(6, 4), **options)
    assert ours.test(Lit(), loader(6, 4), **options) == expected
    with pytest.raises(ValueError, match=r"optimizer that was kept in memory.*without ckpt_path"):
        fit(tmp_path / "ours", OffloadStrategy(nvme, host_memory=WHOLE), resume=path)


class _Counting(Lit):
    """With what state dicts hold beside tensors that are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.each = MeanMetric(), CatMetric()
        self.mean.persistent(True)
        self.each.persistent(True)
        self.count = 0

    def loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().loss_of(tokens)
        self.mean.update(loss.detach())
        self.each.update(loss.detach())
        self.count += 1
        return loss

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_what_modules_have_in_a_plain_checkpoint_beside_tensors_is_taken(
    nvme: Path, tmp_path: Path
) -> None:
    def found(trainer: Trainer) -> list[Any]:
        module = _Counting()
        trainer.test(module, loader(6, 4), ckpt_path=path, verbose=False)
        return [module.count, module.mean.compute(), *module.each.compute()]

    fit(tmp_path / "plain", make=_Counting, max_epochs=1)
    path = tmp_path / "plain" / "epoch=0.ckpt"
    plain = found(trainer_of(tmp_path, "auto", enable_checkpointing=False))
    assert plain[0] > 2
    assert found(_trainer(tmp_path, nvme, enable_checkpointing=False)) == plain


def test_weights_alone_come_with_what_modules_have_beside_tensors(
    nvme: Path, tmp_path: Path
) -> None:
    def found(kind: str, make: Callable[..., Trainer]) -> list[Any]:
        saves = checkpoints(tmp_path / kind, save_weights_only=True)
        trainer = make(callbacks=[saves], max_epochs=1, accumulate_grad_batches=1)
        trained = seeded(_Counting)
        torch.manual_seed(3)
        trainer.fit(trained, loader(0, 4), loader(5, 4))
        path, module = tmp_path / kind / "epoch=0.ckpt", _Counting()
        make(enable_checkpointing=False).test(module, loader(6, 4), ckpt_path=path, verbose=False)
        return [module.count, module.mean.compute(), *module.each.compute()]

    plain = found("plain", partial(trainer_of, tmp_path, "auto"))
    assert plain[0] == 6
    assert found("ours", partial(_trainer, tmp_path, nvme)) == plain


def test_an_error_in_training_leaves_the_module_with_its_values(nvme: Path, tmp_path: Path) -> None:
    class Failing(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            if len(self.seen) == 5:
                raise RuntimeError("stop here")

    module = seeded(Failing)
    trainer = _trainer(tmp_path, nvme, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(module, loader(0, 16), loader(5, 4))
    assert all(value.isfinite().all() for value in values_of(module).values())
    with pytest.raises(RuntimeError, match=r"while fit, validate.*save a checkpoint in fit"):
        assert trainer.strategy.offloaded  # type: ignore[attr-defined]


def test_folder_that_is_no_checkpoint_is_not_replaced_by_one(nvme: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").touch()

    class Saving(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "data")

    trainer = _trainer(tmp_path, nvme, enable_checkpointing=False)
    with pytest.raises(IsADirectoryError, match=r"no checkpoint is not replaced.* another path"):
        trainer.fit(seeded(Saving), loader(0, 4), loader(5, 4))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine.txt"]


def _two_optimizers(folder: Path, nvme: Path) -> None:
    class Two(Lit):
        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(self.gpt.head.parameters(), lr=0.1) for _ in range(2)]
            return made, []

    module = Two(manual=True)
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    trainer = trainer_of(folder, OffloadStrategy(nvme), enable_checkpointing=False, **options)
    trainer.fit(module, loader(0, 4), loader(5, 4))


def _fits(**options: Any) -> Callable[[Path, Path], None]:
    def fits(folder: Path, nvme: Path) -> None:
        trainer = trainer_of(folder, OffloadStrategy(nvme, host_memory=WHOLE), **options)
        trainer.fit(Lit(), loader(0, 4), loader(5, 4))

    return fits


def _lbfgs(folder: Path, nvme: Path) -> None:
    class Closure(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    trainer = trainer_of(folder, OffloadStrategy(nvme), enable_checkpointing=False)
    trainer.fit(Closure(), loader(0, 4), loader(5, 4))


class _Unfreezes(BaseFinetuning):
    """After the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


def _finetunes(callback: BaseFinetuning) -> Callable[[Path, Path], None]:
    def fits(folder: Path, nvme: Path) -> None:
        module: Any = Lit()
        module.backbone = module.gpt
        trainer = trainer_of(folder, OffloadStrategy(nvme, host_memory=WHOLE), callbacks=[callback])
        trainer.fit(module, loader(0, 4), loader(5, 4))

    return fits


REFUSED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "two devices": (_fits(devices=2), r"devices=2.*devices=1.*process_group="),
    "bf16-true": (_fits(precision="bf16-true"), r"precision='bf16-true'.*compute_dtype=torch\.bf"),
    "16-true": (_fits(precision="16-true"), "precision='16-true'"),
    "pruning": (_fits(callbacks=[ModelPruning("l1_unstructured")]), "ModelPruning .*two fits"),
    "averaging": (_fits(callbacks=[StochasticWeightAveraging(1e-3)]), "StochasticWeightAveraging"),
    "an average": (_fits(callbacks=[WeightAveraging()]), r"WeightAveraging .*save_top_k=-1"),
    "finetuning": (_finetunes(BackboneFinetuning(1)), r"BackboneFinetuning .*fit again"),
    "own finetuning": (_finetunes(_Unfreezes()), r"_Unfreezes .*requires_grad_\(False\)"),
    "another io": (_fits(plugins=[AsyncCheckpointIO()]), "plugin AsyncCheckpointIO"),
    "two optimizers": (_two_optimizers, "2 optimizers.*several groups"),
    "LBFGS": (_lbfgs, "LBFGS"),
    "float16": (lambda _, nvme: OffloadStrategy(nvme, compute_dtype=torch.float16), "loss scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, nvme: Path, tmp_path: Path) -> None:
    act, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        act(tmp_path, nvme)
