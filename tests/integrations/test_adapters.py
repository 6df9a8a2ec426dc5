"""Adapters of PEFT in an offloaded model: their files are those of a trainer in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer

from infinity.integrations.transformers import OffloadTrainer
from tests.support.trainers import (
    VOCABULARY,
    arguments,
    assert_same,
    least_of,
    some_texts,
    tiny_llama,
    train,
)
from tests.support.training import same_bits

BUDGET = "64MiB"


def _adapted(config: Any, model: Any = None) -> Any:
    model = tiny_llama() if model is None else model
    torch.manual_seed(1)
    return get_peft_model(model, config)


def _lora(**options: Any) -> LoraConfig:
    chosen: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**(chosen | options))


def _resized(folder: Path) -> Any:
    if not folder.exists():
        tiny_llama().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(9)
    model.resize_token_embeddings(VOCABULARY + 16)
    return _adapted(_lora(), model)


def _two(folder: Path) -> Any:
    model = _adapted(_lora())
    model.add_adapter("second", _lora(target_modules=["k_proj"]))
    return model


MODELS: dict[str, Callable[[Path], Any]] = {
    "resized embeddings": _resized,
    "embeddings": lambda _: _adapted(_lora(target_modules=["embed_tokens"])),
    "shared projections": lambda _: _adapted(VeraConfig(target_modules=["q_proj"], r=8)),
    "prompt": lambda _: _adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "two adapters": _two,
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("name", MODELS)
def test_files_of_adapters_are_those_of_a_trainer_in_memory(
    tmp_path: Path, nvme: Path, name: str
) -> None:
    def make() -> Any:
        return MODELS[name](tmp_path / "base")

    runs, found = [], []
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_only_model": True}
    for folder, kind, more in (
        (tmp_path / "plain", Trainer, {}),
        (tmp_path / "ours", OffloadTrainer, {"nvme": nvme, "host_memory": BUDGET}),
    ):
        train(kind, arguments(folder, **options), model=make, **more)
        saved = folder / "checkpoint-2"
        files = {p.relative_to(saved): load_file(p) for p in saved.rglob("adapter*.safetensors")}
        found.append(
            {(file, key): v for file, values in files.items() for key, v in values.items()}
        )
        args = arguments(folder, **(options | {"max_steps": 3}))
        runs.append(train(kind, args, model=make, resume=True, **more))
    assert found[0].keys() == found[1].keys()
    assert all(same_bits(found[0][key], found[1][key]) for key in found[0])
    assert_same(*runs, except_logged=("grad_norm",))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_files_of_adapters_have_the_head_below_them_also_where_that_is_in_tiles(
    tmp_path: Path, nvme: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_only_model": True}
    tiled = {"nvme": nvme, "host_memory": BUDGET, "max_parameter_bytes": "256KiB"}
    found = []
    for folder, kind, more in (
        (tmp_path / "plain", Trainer, {}),
        (tmp_path / "ours", OffloadTrainer, tiled),
    ):
        for steps, resume in ((2, None), (3, True)):
            args = arguments(folder, **(options | {"max_steps": steps, "save_steps": 1}))
            train(kind, args, model=_with_adapted_head, resume=resume, **more)
        found.append(load_file(folder / "checkpoint-3" / "adapter_model.safetensors"))
    plain, ours = found
    assert plain.keys() == ours.keys()
    assert any("lm_head.base_layer" in name for name in plain)
    for name, value in plain.items():
        assert value.allclose(ours[name], atol=1e-4), name


def _with_adapted_head() -> Any:
    return _adapted(_lora(target_modules=["q_proj", "lm_head"]))


def test_best_adapters_are_loaded_where_weights_alone_are_saved(tmp_path: Path, nvme: Path) -> None:
    options: dict[str, Any] = {"load_best_model_at_end": True, "save_only_model": True}
    options |= {"learning_rate": 0.3, "lr_scheduler_type": "constant"}
    runs = []
    for folder, kind, more in (
        (tmp_path / "plain", Trainer, {}),
        (tmp_path / "ours", OffloadTrainer, {"nvme": nvme, "host_memory": BUDGET}),
    ):
        args = arguments(folder, **options)
        runs.append(train(kind, args, model=lambda: _adapted(_lora()), **more))
    assert_same(*runs, except_logged=("grad_norm",))


def _experts(width: int = 128) -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return _adapted(_lora(target_modules=[], target_parameters=names), MixtralForCausalLM(config))


def test_adapters_of_experts_train_as_in_memory(tmp_path: Path, nvme: Path) -> None:
    """PEFT gives their weights a parametrization in every forward pass."""
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    plain = train(Trainer, arguments(tmp_path / "plain", **options), model=_experts)
    args = arguments(tmp_path / "ours", **options)
    least = least_of(OffloadTrainer, model=_experts(), args=args, nvme=nvme, **some_texts())
    ours = train(OffloadTrainer, args, model=_experts, nvme=nvme, host_memory=least)
    assert_same(plain, ours, except_logged=("grad_norm",))


def test_experts_that_adapters_are_added_to_stay_whole(
    tmp_path: Path, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sum of the two could not be put in the place of tiles: the first pass was refused."""
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    tiled: Any = {"nvme": nvme, "host_memory": BUDGET, "max_parameter_bytes": "256KiB"}
    plain, ours = (
        train(kind, arguments(tmp_path, **options), model=lambda: _experts(256), **more)
        for kind, more in ((Trainer, {}), (OffloadTrainer, tiled))
    )
    assert_same(plain, ours, except_logged=("grad_norm",))
    assert "gate_up_proj (512.00 KiB, with an adapter of target_parameters" in caplog.text
