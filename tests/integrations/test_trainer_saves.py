"""Checkpoints of an ``OffloadTrainer``: whole or not there, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import checkpoint
from infinity.integrations.published import publish
from infinity.integrations.transformers import OffloadTrainer
from infinity.integrations.transformers.folders import recover, replacing
from infinity.model import training_of
from tests.support.trainers import (
    arguments,
    assert_same,
    run_killed,
    some_texts,
    texts,
    tiny_llama,
    train,
)
from tests.support.training import same_bits, values_of
from tests.support.trl_runs import tokenizer

BUDGET = "24MiB"


class _KilledInSave(OffloadTrainer):
    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def killed_in_a_save(folder: str, nvme: str) -> None:
    """In a process of its own."""
    train(_KilledInSave, arguments(Path(folder)), nvme=nvme, host_memory=BUDGET)


def test_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path: Path, nvme: Path) -> None:
    folder = tmp_path / "run"
    run_killed(f"{__name__}:killed_in_a_save({str(folder)!r}, {str(nvme)!r})")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    whole = train(OffloadTrainer, arguments(tmp_path / "whole"), nvme=nvme, host_memory=BUDGET)
    args = arguments(folder)
    assert_same(whole, train(OffloadTrainer, args, resume=True, nvme=nvme, host_memory=BUDGET))
    assert list(folder.glob(".*")) == []


@contextmanager
def handling(handle: Callable[[], object]) -> Iterator[None]:
    """SIGUSR1."""
    previous = signal.signal(signal.SIGUSR1, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


class _BrokenInto(OffloadTrainer):
    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 4:
            signal.raise_signal(signal.SIGUSR1)
        super()._save_rng_state(output_dir)


@pytest.mark.parametrize("call", ["close", "save"])
def test_call_of_a_handler_in_a_save_is_refused_and_the_checkpoint_before_it_stays(
    call: str, tmp_path: Path, nvme: Path
) -> None:
    folder = tmp_path / "run"
    refused: list[str] = []
    given: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    trainer = _BrokenInto(tiny_llama(), arguments(folder), **some_texts(), **given)

    def end() -> None:
        try:
            trainer.close() if call == "close" else trainer._save_checkpoint(trainer.model, None)
        except RuntimeError as error:
            refused.append(str(error))
        raise SystemExit(3)

    with handling(end), pytest.raises(SystemExit):
        trainer.train()
    trainer.close()
    assert len(refused) == 1
    assert "while checkpoint-4 is being saved, by the handler of a signal" in refused[0]
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert list(folder.glob(".saving-*")) == []
    whole = train(OffloadTrainer, arguments(tmp_path / "whole"), **given)
    assert_same(whole, train(OffloadTrainer, arguments(folder), resume=True, **given))


class _Interrupts(TrainerCallback):
    """In a forward pass, once."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            residency: Any = training_of(self.trainer.offloaded).residency
            take = residency._take

            def broken_into(*args: Any, **options: Any) -> Any:
                vars(residency).pop("_take", None)
                signal.raise_signal(signal.SIGUSR1)
                return take(*args, **options)

            residency._take = broken_into


def test_close_by_a_handler_in_a_forward_pass_is_refused_and_training_goes_on(
    tmp_path: Path, nvme: Path
) -> None:
    given: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    interrupts, refused = _Interrupts(), []
    trainer = OffloadTrainer(
        tiny_llama(), arguments(tmp_path / "run"), **some_texts(), **given, callbacks=[interrupts]
    )
    interrupts.trainer = trainer

    def close() -> None:
        try:
            trainer.close()
        except RuntimeError as error:
            refused.append(str(error))

    with handling(close):
        trainer.train()
    trainer.close()
    assert len(refused) == 1
    assert refused[0].startswith("close() in the midst of a step or a forward pass")
    whole = train(OffloadTrainer, arguments(tmp_path / "whole"), **given)
    values = values_of(trainer.model)
    assert all(same_bits(value, values[name]) for name, value in whole.values.items())


class _FullDisk(OffloadTrainer):
    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), output_dir)
        super()._save_rng_state(output_dir)


def test_save_that_fails_leaves_the_trainer_usable(tmp_path: Path, nvme: Path) -> None:
    args: Any = arguments(tmp_path / "run")
    model = tiny_llama()
    with _FullDisk(model, args, nvme=nvme, host_memory=BUDGET, **some_texts()) as trainer:
        with pytest.raises(OSError, match="No space left"):
            trainer.train()
        trainer.save_model(str(tmp_path / "model"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-2"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    values = values_of(model)
    assert all(same_bits(values[name], value) for name, value in saved.named_parameters())


class _SeesFolder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append((folder / "infinity" / "manifest.json").is_file())


def test_callback_that_is_told_of_a_save_finds_it(tmp_path: Path, nvme: Path) -> None:
    callback = _SeesFolder()
    options: dict[str, Any] = {"callbacks": [callback], "processing_class": tokenizer()}
    args = arguments(tmp_path / "run", max_steps=4, save_total_limit=1)
    train(OffloadTrainer, args, nvme=nvme, host_memory=BUDGET, **options)
    assert callback.seen == [True, True]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-4"]
    assert (tmp_path / "run" / "checkpoint-4" / "tokenizer.json").is_file()


def test_resuming_from_weights_alone_is_what_it_is_in_memory(tmp_path: Path, nvme: Path) -> None:
    runs = []
    kinds: Any = (
        ("plain", Trainer, {}),
        ("offloaded", OffloadTrainer, {"nvme": nvme, "host_memory": BUDGET}),
    )
    for name, kind, more in kinds:
        options: dict[str, Any] = {"save_only_model": True, "max_steps": 2}
        train(kind, arguments(tmp_path / name, **options), **more)
        options |= {"max_steps": 4}
        runs.append(train(kind, arguments(tmp_path / name, **options), resume=True, **more))
    assert_same(*runs, except_logged=("grad_norm",))


def _with_adapters() -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(tiny_llama(), config)


def test_adapters_are_saved_alone_and_resumed(tmp_path: Path, nvme: Path) -> None:
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET, "model": _with_adapters}
    plain = train(Trainer, arguments(tmp_path / "plain"), model=_with_adapters)
    whole = train(OffloadTrainer, arguments(tmp_path / "run"), **more)
    assert_same(plain, whole, except_logged=("grad_norm",))
    last = tmp_path / "run" / "checkpoint-6"
    assert (last / "adapter_model.safetensors").stat().st_size < 1 << 20
    last.rename(tmp_path / "last")
    assert_same(whole, train(OffloadTrainer, arguments(tmp_path / "run"), resume=True, **more))


def test_what_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").touch()
    staged = tmp_path / ".saving-00c0ffee" / "checkpoint-2"
    staged.mkdir(parents=True)
    (tmp_path / "checkpoint-2").rename(tmp_path / ".replaced-checkpoint-2")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    staged.mkdir(parents=True)
    (staged / "new").touch()
    publish(staged, tmp_path / "checkpoint-2")
    assert [path.name for path in (tmp_path / "checkpoint-2").iterdir()] == ["new"]


class _Acts(TrainerCallback):
    """While the checkpoint of the step before may still be written."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        self._act = act
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            self._act(self.trainer)


def _saves_model(trainer: Any) -> None:
    trainer.save_model()


def _saves_into_the_checkpoint(trainer: Any) -> None:
    step = trainer.state.global_step
    if step % 2 == 0:
        trainer.save_model(f"{trainer.args.output_dir}/checkpoint-{step}")


def _trains_another(trainer: Any) -> None:
    args = arguments(Path(trainer.args.output_dir), max_steps=1, eval_strategy="no", save_steps=9)
    nvme = trainer._offload_options.nvme
    with OffloadTrainer(tiny_llama(), args, nvme=nvme, host_memory=BUDGET, **some_texts()) as other:
        other.train()


@pytest.mark.parametrize("act", [_saves_model, _saves_into_the_checkpoint, _trains_another])
def test_checkpoint_that_is_being_saved_stays_whatever_else_saves_there(
    tmp_path: Path, nvme: Path, act: Callable[[Any], None]
) -> None:
    callback = _Acts(act)
    run = tmp_path / "run"
    args = arguments(run, max_steps=4, eval_strategy="no")
    options: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET, "callbacks": [callback]}
    with OffloadTrainer(tiny_llama(), args, **options, **some_texts()) as trainer:
        callback.trainer = trainer
        trainer.train()
    assert list(run.glob(".*")) == []
    for name in ("checkpoint-2", "checkpoint-4"):
        assert checkpoint.verify(run / name / "infinity").ok
        assert (run / name / "trainer_state.json").is_file()
        assert AutoModelForCausalLM.from_pretrained(run / name)


def test_weights_that_a_folder_had_go_with_the_model_that_replaces_them(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "notes.txt"):
        (tmp_path / name).write_text("old")
    with replacing(tmp_path) as staged:
        (staged / "model.safetensors").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "notes.txt"}
    assert (tmp_path / "model.safetensors").read_text() == "new"


def test_best_checkpoint_is_known_where_evaluation_comes_after_the_save(
    tmp_path: Path, nvme: Path
) -> None:
    data = {"train_dataset": texts(16), "eval_dataset": texts(8, seed=4)}
    options: dict[str, Any] = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
        "save_steps": 1,
    }
    options |= {"save_total_limit": 2}
    found = []
    for kind, name in ((Trainer, "plain"), (OffloadTrainer, "offloaded")):
        args = arguments(tmp_path / name, num_train_epochs=2, max_steps=-1, **options)
        more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
        train(kind, args, data=data, **(more if kind is OffloadTrainer else {}))
        saved = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        kept = sorted(path.name for path in (tmp_path / name).iterdir())
        found.append((Path(saved["best_model_checkpoint"]).name, kept))
    assert found[0] == found[1]
