"""``OffloadTrainer`` goes on from a checkpoint of a ``Trainer`` that keeps its optimizer in memory,
to the bits of that one left alone.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from infinity.integrations.transformers import OffloadTrainer
from infinity.integrations.transformers.memory_checkpoints import _state_in
from tests.support.trainers import (
    Run,
    arguments,
    assert_same,
    least_of,
    logged_by,
    some_texts,
    tiny_llama,
    train,
)
from tests.support.training import values_of


def _partly_frozen() -> Any:
    model: Any = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    return model


def _adapted() -> Any:
    config = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(model, config)


class _StopAtOnce(transformers.TrainerCallback):
    """When all is loaded, and no step is taken."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        raise InterruptedError


def _plain(make: Callable[[], Any], folder: Path) -> tuple[Run, Path]:
    args = arguments(folder, optim="adamw_torch_fused")
    return train(transformers.Trainer, args, model=make), folder / "checkpoint-2"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is not changed."""
    folder = tmp_path_factory.mktemp("plain")
    trainer = transformers.Trainer(
        tiny_llama(), arguments(folder, max_steps=2, optim="adamw_torch_fused"), **some_texts()
    )
    trainer.train()
    return folder / "checkpoint-2"


def _given(model: Any) -> dict[str, Any]:
    """An optimizer of all parameters, also of those that are frozen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return {"optimizers": (optimizer, None)}


@pytest.mark.parametrize("make", [tiny_llama, _partly_frozen, _adapted])
def test_a_checkpoint_of_memory_goes_on_to_the_bits_of_the_run_left_alone(
    make: Callable[[], Any], tmp_path: Path, nvme: Path
) -> None:
    plain, folder = _plain(make, tmp_path / "plain")
    options = {"args": arguments(tmp_path / "ours"), "nvme": nvme}
    options["host_memory"] = least_of(OffloadTrainer, model=make(), **options, **some_texts())
    ours = train(OffloadTrainer, model=make, resume=str(folder), **options)
    skipped = () if make is tiny_llama else ("grad_norm",)
    assert_same(plain, ours, except_logged=skipped)


def test_a_given_optimizer_of_frozen_parameters_too_numbers_them_all(
    tmp_path: Path, nvme: Path
) -> None:
    runs: list[Run] = []
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (transformers.Trainer, {}),
        (OffloadTrainer, {"nvme": nvme, "host_memory": "256MiB"}),
    ]
    for kind, given in kinds:
        resume = str(tmp_path / "Trainer" / "checkpoint-2") if runs else None
        model = _partly_frozen()
        trainer = kind(
            model, arguments(tmp_path / kind.__name__), **some_texts(), **_given(model), **given
        )
        trainer.train(resume_from_checkpoint=resume)
        logged = logged_by(trainer)
        if runs:
            trainer.close()
        runs.append(Run(logged, values_of(model)))
    assert_same(*runs, except_logged=("grad_norm",))


def test_weights_of_a_checkpoint_of_memory_keep_the_precision_of_masters(
    plain: Path, tmp_path: Path, nvme: Path
) -> None:
    model, args = tiny_llama(), arguments(tmp_path / "ours")
    options: dict[str, Any] = {"nvme": nvme, "host_memory": "256MiB", "compute_dtype": "bfloat16"}
    trainer = OffloadTrainer(model, args, **some_texts(), **options, callbacks=[_StopAtOnce()])
    with trainer, pytest.raises(InterruptedError):
        trainer.train(resume_from_checkpoint=str(plain))
    saved, ours = load_file(plain / "model.safetensors"), values_of(model)
    assert saved.keys() <= ours.keys()
    for name, value in saved.items():
        assert torch.equal(value, ours[name]), name


def _rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "optimizer.pt")


def _of_adafactor(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        del group["betas"]


def _without_norms(folder: Path) -> None:
    values = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in values.items() if "norm" not in name}
    save_file(kept, folder / "model.safetensors")


def _in_bfloat16(state: dict[str, Any]) -> None:
    for kept in state["state"].values():
        kept["exp_avg"] = kept["exp_avg"].bfloat16()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SPOILT: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], str]] = {
    "other optimizer": (
        lambda folder: _rewritten(folder, _of_adafactor),
        tiny_llama,
        r"not of AdamW.*without optimizer\.pt and sch",
    ),
    "other frozen": (
        lambda _: None,
        _partly_frozen,
        r"groups of 23 and 7 .* of this trainer has groups of 15 and 5.*without optimizer\.pt",
    ),
    "weights missing": (_without_norms, tiny_llama, r"no safetensors with .*norm.*infinity import"),
    "moments of 16 bits": (
        lambda folder: _rewritten(folder, _in_bfloat16),
        tiny_llama,
        r"keeps exp_avg of .* in bfloat16, and not in float32.*without optimizer\.pt",
    ),
    "moments that are none": (
        lambda folder: _rewritten(folder, lambda state: state["state"][3].update(exp_avg=1.0)),
        tiny_llama,
        r"keeps exp_avg of .* in float, and not in float32",
    ),
    "weights cut": (
        lambda folder: _cut(folder / "model.safetensors"),
        tiny_llama,
        r"model\.safetensors is no safetensors file",
    ),
    "weights pickled": (
        _pickled,
        tiny_llama,
        r"Can't find a valid checkpoint at .*pickled files.*Convert them",
    ),
    "scheduler cut": (
        lambda folder: _cut(folder / "scheduler.pt"),
        tiny_llama,
        r"scheduler\.pt cannot be read",
    ),
    "scheduler missing": (
        lambda folder: (folder / "scheduler.pt").unlink(),
        tiny_llama,
        r"scheduler\.pt does not exist",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_checkpoint_of_memory_that_does_not_fit_is_refused_and_nothing_changed(
    case: str, plain: Path, tmp_path: Path, nvme: Path
) -> None:
    spoil, make, message = SPOILT[case]
    folder = tmp_path / plain.name
    shutil.copytree(plain, folder)
    spoil(folder)
    model = make()
    before = {name: value.clone() for name, value in values_of(model).items()}
    args = arguments(tmp_path / "ours")
    trainer = OffloadTrainer(model, args, **some_texts(), nvme=nvme, host_memory="256MiB")
    with trainer, pytest.raises((ValueError, FileNotFoundError), match=message):
        trainer.train(resume_from_checkpoint=str(folder))
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({0: torch.tensor(float("inf"))}, "no number of steps as step of up"),
        ({0: 2.5}, "no number of steps as step of up"),
        ({0: None}, "no number of steps as step of up"),
        ({5: 1}, "has state of 5"),
        ([], "not those of a state dict"),
    ],
)
def test_a_state_in_no_form_of_one_is_refused_by_name(
    state: Any, message: str, tmp_path: Path
) -> None:
    if isinstance(state, dict):
        moment = torch.zeros(3)
        state = {
            number: {"step": step, "exp_avg": moment, "exp_avg_sq": moment}
            for number, step in state.items()
        }
    groups = torch.optim.AdamW([torch.zeros(3)]).state_dict()["param_groups"]
    torch.save({"state": state, "param_groups": groups}, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=message):
        _state_in(tmp_path, [["up"]])


def test_a_copy_without_the_optimizer_goes_on_with_the_weights(
    plain: Path, tmp_path: Path, nvme: Path
) -> None:
    folder = tmp_path / plain.name
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("optimizer.pt", "scheduler.pt"))
    args = arguments(tmp_path / "ours", max_steps=2)
    ours = train(OffloadTrainer, args, resume=str(folder), nvme=nvme, host_memory="256MiB")
    for name, value in load_file(plain / "model.safetensors").items():
        assert torch.equal(value, ours.values[name]), name
