"""When an ``OffloadTrainer`` has its model offloaded, and what of a trainer works meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, LlamaForCausalLM, Trainer, TrainerCallback

from infinity.integrations.transformers import OffloadMixin, OffloadTrainer
from tests.support.trainers import (
    ROOT,
    arguments,
    assert_same,
    logged_by,
    some_texts,
    texts,
    tiny_llama,
    train,
)
from tests.support.training import same_bits, values_of

BUDGET = "24MiB"


def _trainer(nvme: Path, folder: Path, kind: Any = OffloadTrainer, **options: Any) -> Any:
    given = {key: options.pop(key) for key in ("callbacks", "model_init") if key in options}
    model = {} if "model_init" in given else {"model": tiny_llama()}
    args = arguments(folder, **({"max_steps": 2, "save_strategy": "no"} | options))
    return kind(**model, args=args, nvme=nvme, host_memory=BUDGET, **some_texts(), **given)


def test_trainer_evaluates_and_predicts_before_and_after_training(
    tmp_path: Path, nvme: Path
) -> None:
    args = arguments(tmp_path / "plain", max_steps=2, save_strategy="no")
    plain: Any = Trainer(model=tiny_llama(), args=args, **some_texts())
    with _trainer(nvme, tmp_path / "offloaded") as offloaded:
        for trainer in (plain, offloaded):
            torch.manual_seed(7)
            trainer.evaluate()
            trainer.train()
            trainer.evaluate()
        assert logged_by(plain) == _but_norms(offloaded, plain)
        expected, got = (t.predict(texts(4, seed=9)).predictions for t in (plain, offloaded))
        assert np.array_equal(expected, got)


def _but_norms(offloaded: Any, plain: Any) -> list[dict[str, float]]:
    """What was logged, with norms that are nearly equal as those of ``plain``."""
    logged = logged_by(offloaded)
    for entry, other in zip(logged, logged_by(plain), strict=True):
        if "grad_norm" in entry:
            assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
            entry["grad_norm"] = other["grad_norm"]
    return logged


def test_trainer_without_data_to_train_with_is_offloaded_for_inference(
    tmp_path: Path, nvme: Path
) -> None:
    args = arguments(tmp_path, eval_strategy="no")
    data = texts(8, seed=4)
    expected = Trainer(model=tiny_llama(), args=args, eval_dataset=data).evaluate()["eval_loss"]
    with OffloadTrainer(
        model=tiny_llama(), args=args, eval_dataset=data, nvme=nvme, host_memory="16MiB"
    ) as trainer:
        assert trainer.evaluate()["eval_loss"] == expected
        assert trainer.optimizer is None


def test_closing_gives_the_model_its_trained_values_back(tmp_path: Path, nvme: Path) -> None:
    trainer = _trainer(nvme, tmp_path)
    before = values_of(trainer.model)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.close()
    trainer.close()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    trained = values_of(trainer.model)
    assert not all(same_bits(before[name], value) for name, value in trained.items())
    assert all(same_bits(trained[name], value) for name, value in saved.named_parameters())


def test_trainer_that_nothing_refers_to_gives_the_model_its_values_back(
    tmp_path: Path, nvme: Path
) -> None:
    trainer = _trainer(nvme, tmp_path)
    model = trainer.model
    trainer.train()
    expected = trainer.offloaded
    del trainer
    gc.collect()
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert torch.isfinite(model.lm_head.weight).all()
    with pytest.raises(RuntimeError, match="not offloaded any more"):
        expected.flush()


class _Stop(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=repr)
def test_trainer_is_usable_after_an_exception(
    tmp_path: Path, nvme: Path, error: BaseException
) -> None:
    plain = train(Trainer, arguments(tmp_path / "plain", max_steps=2, save_strategy="no"))
    with _trainer(nvme, tmp_path / "a", callbacks=[_Stop(error)]) as trainer:
        with pytest.raises(type(error)):
            trainer.train()
        assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
        torch.manual_seed(5)
        trainer.train()
        last = [entry for entry in logged_by(trainer) if "loss" in entry]
    assert len(last) == len([entry for entry in plain.logged if "loss" in entry])


def test_second_training_goes_on_with_the_moments_of_the_first(tmp_path: Path, nvme: Path) -> None:
    runs = []
    kinds: Any = (
        ("plain", Trainer, {}),
        ("offloaded", OffloadTrainer, {"nvme": nvme, "host_memory": BUDGET}),
    )
    for name, kind, more in kinds:
        args = arguments(tmp_path / name, max_steps=2, save_strategy="no")
        trainer = kind(model=tiny_llama(), args=args, **some_texts(), **more)
        trainer.train()
        trainer.train()
        if isinstance(trainer, OffloadMixin):
            trainer.close()
        runs.append(values_of(trainer.model))
    assert all(same_bits(value, runs[1][name]) for name, value in runs[0].items())


def _one_after_the_other(kind: Any, folder: Path, **more: Any) -> Any:
    """A second trainer goes on with the model that the first has trained, which is still there."""
    model = tiny_llama()
    trainers = []
    for name in ("first", "second"):
        args = arguments(folder / name, max_steps=2, save_strategy="no")
        trainers.append(kind(model, args, **some_texts(), **more))
        trainers[-1].train()
    return trainers


def test_second_trainer_of_a_model_goes_on_with_its_weights(
    tmp_path: Path, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = _one_after_the_other(Trainer, tmp_path / "plain")
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    first, second = _one_after_the_other(OffloadTrainer, tmp_path / "offloaded", **more)
    assert "offloaded by another trainer, which is closed" in caplog.text
    with pytest.raises(RuntimeError, match="offloaded by the first train"):
        _ = first.offloaded
    second.close()
    weights = values_of(second.model)
    assert all(same_bits(v, weights[name]) for name, v in values_of(plain[1].model).items())


class _UsesAnotherTrainer(TrainerCallback):
    def __init__(self, other: Any) -> None:
        self.other = other

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.other.evaluate()


def test_model_is_not_taken_from_a_trainer_that_trains(tmp_path: Path, nvme: Path) -> None:
    with _trainer(nvme, tmp_path / "one") as trainer:
        args = arguments(tmp_path / "two")
        more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
        other = OffloadTrainer(trainer.model, args, **some_texts(), **more)
        trainer.add_callback(_UsesAnotherTrainer(other))
        with pytest.raises(ValueError, match=r"LlamaForCausalLM .* in the midst of train\(\)"):
            trainer.train()


def test_model_that_was_streamed_in_is_not_taken_from_its_trainer(
    tmp_path: Path, nvme: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        model = tiny_llama()
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET, **some_texts()}
    more["weights"] = tmp_path / "model"
    with OffloadTrainer(model, arguments(tmp_path / "run"), **more) as trainer:
        trainer.evaluate()
        other = OffloadTrainer(model, arguments(tmp_path / "other"), **more)
        with pytest.raises(ValueError, match=r"save_model\(folder\) and close\(\)"):
            other.evaluate()


def test_model_init_makes_a_new_model_for_each_training(tmp_path: Path, nvme: Path) -> None:
    with _trainer(nvme, tmp_path, model_init=tiny_llama) as trainer:
        losses = []
        for _ in range(2):
            trainer.train()
            losses.append([entry["loss"] for entry in logged_by(trainer) if "loss" in entry])
    assert losses[0] == losses[1]


class _Hungry(Trainer):
    """Runs out of memory with batches of more than two."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate a lot")
        return super().compute_loss(model, inputs, *args, **kwargs)


class _OffloadedHungry(OffloadMixin, _Hungry):
    """One class name changed."""


def test_batch_size_is_found_as_in_memory(tmp_path: Path, nvme: Path) -> None:
    options: dict[str, Any] = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    plain = train(_Hungry, arguments(tmp_path / "plain", **options))
    args = arguments(tmp_path / "offloaded", **options)
    offloaded = train(_OffloadedHungry, args, nvme=nvme, host_memory=BUDGET)
    assert_same(plain, offloaded, except_logged=("grad_norm",))


def test_best_model_is_loaded_after_an_early_stop(tmp_path: Path, nvme: Path) -> None:
    options: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "eval_steps": 1,
        "save_steps": 1,
        "save_total_limit": 1,
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "max_steps": 8,
    }
    stopping = [EarlyStoppingCallback(early_stopping_patience=2)]
    plain = train(Trainer, arguments(tmp_path / "plain", **options), callbacks=stopping)
    args = arguments(tmp_path / "offloaded", **options)
    stopping = [EarlyStoppingCallback(early_stopping_patience=2)]
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET, "callbacks": stopping}
    offloaded = train(OffloadTrainer, args, **more)
    assert len(plain.logged) < 16
    assert_same(plain, offloaded, except_logged=("grad_norm",))
    kept = [{path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "offloaded")]
    assert kept[0] == kept[1]


SCRIPT = """
from pathlib import Path
from infinity.integrations.transformers import OffloadTrainer
from tests.support.trainers import arguments, some_texts, tiny_llama
folder = Path({folder!r})
args = arguments(folder, max_steps=2, save_strategy="no", logging_strategy="no")
trainer = OffloadTrainer(tiny_llama(), args, nvme={nvme!r}, host_memory="24MiB", **some_texts())
trainer.train()
{then}
"""


@pytest.mark.parametrize(
    ("then", "lost"), [("trainer.save_model()", False), ("pass", True)], ids=["saved", "unsaved"]
)
def test_script_that_does_not_close_is_told_of_values_that_are_lost(
    tmp_path: Path, nvme: Path, then: str, lost: bool
) -> None:
    program = SCRIPT.format(folder=str(tmp_path / "run"), nvme=str(nvme), then=then)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ("was never left" in ended.stderr) == lost
