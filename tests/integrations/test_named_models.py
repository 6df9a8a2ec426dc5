"""Models that trainers of TRL are given by name: their weights are those of their files,
whatever is put around them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file
from trl.trainer.utils import create_model_from_path

from infinity.integrations import trl as offloaded_trl
from infinity.integrations.transformers.model_files.streamed import made_of
from tests.support.trainers import Run, arguments, assert_same, logged_by, tiny_llama
from tests.support.training import same_bits, values_of
from tests.support.trl_runs import preferences, sentences, tokenizer


@pytest.fixture
def named(tmp_path: Path) -> str:
    folder = tmp_path / "named"
    tiny_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def _lora(**options: Any) -> LoraConfig:
    chosen: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**(chosen | options))


def _given(folder: Path, kind: str = "SFT", **options: Any) -> dict[str, Any]:
    options = {
        "eval_strategy": "no",
        "save_strategy": "no",
        "bf16": False,
        "max_steps": 2,
    } | options
    data = sentences(32) if kind == "SFT" else preferences(32)
    args = arguments(folder, getattr(trl, f"{kind}Config"), **options)
    return {"args": args, "train_dataset": data}


def _train(kind: Any, named: str, given: dict[str, Any], **more: Any) -> Run:
    trainer = kind(named, **given, **more)
    trainer.train()
    if not more.get("nvme"):
        return Run(logged_by(trainer), values_of(trainer.model))
    with trainer.offloaded.gathered():
        run = Run(logged_by(trainer), values_of(trainer.model))
    trainer.close()
    return run


def _gaussian() -> LoraConfig:
    return _lora(init_lora_weights="gaussian", modules_to_save=["lm_head"])


def _rescaling() -> IA3Config:
    return IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])


@pytest.mark.parametrize(
    ("kind", "adapters"), [("SFT", _lora), ("SFT", _gaussian), ("SFT", _rescaling), ("DPO", _lora)]
)
def test_named_model_with_adapters_trains_as_it_does_in_memory(
    tmp_path: Path, nvme: Path, named: str, kind: str, adapters: Callable[[], Any]
) -> None:
    runs = []
    for name, trl_kind, more in (
        ("plain", getattr(trl, f"{kind}Trainer"), {}),
        (
            "offloaded",
            getattr(offloaded_trl, f"Offload{kind}Trainer"),
            {"nvme": nvme, "host_memory": "64MiB"},
        ),
    ):
        given = _given(tmp_path / name, kind) | {"peft_config": adapters()}
        runs.append(_train(trl_kind, named, given, **more))
    assert_same(*runs, except_logged=("grad_norm",))


def test_named_model_with_adapters_has_its_weights_again_after_it_was_closed(
    tmp_path: Path, nvme: Path, named: str
) -> None:
    kind = offloaded_trl.OffloadSFTTrainer
    trainer = kind(named, **_given(tmp_path), peft_config=_lora(), nvme=nvme, host_memory="64MiB")
    stored = load_file(Path(named) / "model.safetensors")
    for _ in range(2):
        trainer.train()
        with trainer.offloaded.gathered():
            now = values_of(trainer.model)
        for name, value in now.items():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert "lora" in name or "inv_freq" in name or same_bits(value, stored[plain]), name
        trainer.close()
    assert all(p.is_meta != ("lora" in name) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (lambda: _lora(use_dora=True), "'dora' begin with what is computed"),
        (lambda: _lora(init_lora_weights="pissa"), "'pissa' begin with"),
        (lambda: _lora(init_lora_weights="olora"), "'olora' begin with"),
        (lambda: _lora(trainable_token_indices=[5, 7]), "trainable_tokens.* is computed"),
    ],
)
def test_adapters_that_begin_with_the_weights_of_a_named_model_are_refused_with_the_remedy(
    tmp_path: Path, nvme: Path, named: str, adapters: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"{said}.* load the model .*from_pretrained"):
        offloaded_trl.OffloadSFTTrainer(
            named, **_given(tmp_path), peft_config=adapters(), nvme=nvme, host_memory="64MiB"
        )


def test_log_probabilities_before_training_are_refused_of_a_named_model(
    tmp_path: Path, nvme: Path, named: str
) -> None:
    given = _given(tmp_path, "DPO", precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs=True needs .*load the model"):
        offloaded_trl.OffloadDPOTrainer(named, **given, nvme=nvme, host_memory="64MiB")


@pytest.mark.parametrize("adapters", [None, _lora])
def test_chat_template_that_resizes_a_named_model_is_refused_with_the_remedy(
    adapters: Callable[[], Any] | None, tmp_path: Path, nvme: Path, named: str
) -> None:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = (
        "{% for m in messages %}<|im_start|> {{m['content']}} <|im_end|>{% endfor %}"
    )
    words.save_pretrained(tmp_path / "template")
    given = _given(tmp_path, chat_template_path=str(tmp_path / "template"))
    with pytest.raises(ValueError, match=r"cannot be resized .*chat_template_path.* load the mod"):
        offloaded_trl.OffloadSFTTrainer(
            named,
            **given,
            peft_config=adapters and adapters(),
            nvme=nvme,
            host_memory="64MiB",
        )


def test_resizing_a_named_model_before_training_is_refused_with_the_remedy(
    tmp_path: Path, nvme: Path, named: str
) -> None:
    trainer = offloaded_trl.OffloadSFTTrainer(
        named, **_given(tmp_path), nvme=nvme, host_memory="64MiB"
    )
    model: Any = trainer.model
    size = model.config.vocab_size
    assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    for options in ({"new_num_tokens": size + 1}, {"pad_to_multiple_of": size + 1}):
        with pytest.raises(ValueError, match=rf"of {size} tokens, cannot .* {size + 1} .* load th"):
            model.resize_token_embeddings(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False, "attention_dropout": 0.25},
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "attn_implementation": "eager"},
        {"dtype": "auto", "low_cpu_mem_usage": True, "local_files_only": True, "device_map": None},
        {"token": None, "trust_remote_code": False, "use_safetensors": True},
    ],
    ids=str,
)
def test_options_of_a_named_model_are_those_of_from_pretrained(
    named: str, options: dict[str, Any]
) -> None:
    plain = create_model_from_path(named, **dict(options))
    ours = made_of(Path(named), options)
    assert (ours.dtype, type(ours)) == (plain.dtype, type(plain))
    for one in (plain, ours):
        one.config.name_or_path = ""
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize("option", ["quantization_config", "device_map", "gguf_file", "variant"])
def test_option_that_a_named_model_cannot_have_is_refused_with_the_remedy(
    named: str, option: str
) -> None:
    with pytest.raises(ValueError, match=f"'{option}': .* remove it, or load the model"):
        made_of(Path(named), {option: "auto"})
