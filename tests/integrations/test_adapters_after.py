"""What becomes of adapters after training: saved, merged, several of them, over a frozen base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import infinity
from infinity.integrations.transformers import OffloadTrainer
from tests.support.trainers import arguments, assert_same, some_texts, tiny_llama, train
from tests.support.training import same_bits, values_of

BUDGET = "64MiB"
OPTIONS: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


def _lora(**options: Any) -> LoraConfig:
    chosen: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**(chosen | options))


def _adapted() -> Any:
    model = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(model, _lora())


def _trained(kind: Any, folder: Path, model: Any, **more: Any) -> Any:
    trainer = kind(model, arguments(folder, **OPTIONS), **some_texts(), **more)
    trainer.train()
    return trainer


def _equal(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(same_bits(first[k], second[k]) for k in first)


def test_model_saves_its_adapters_and_merges_them_after_close(tmp_path: Path, nvme: Path) -> None:
    plain = _trained(Trainer, tmp_path / "plain", _adapted())
    ours = _trained(OffloadTrainer, tmp_path / "run", _adapted(), nvme=nvme, host_memory=BUDGET)
    for trainer, name in ((plain, "a"), (ours, "b")):
        trainer.model.save_pretrained(tmp_path / name)
    found = [load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab"]
    assert _equal(*found)
    for name in ("merge_and_unload", "merge_adapter", "unload"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) changes .* call close\(\)"):
            getattr(ours.model, name)()
    ours.close()
    merged = [trainer.model.merge_and_unload() for trainer in (plain, ours)]
    assert _equal(values_of(merged[0]), values_of(merged[1]))
    merged[1].save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert _equal(dict(again.named_parameters()), dict(merged[0].named_parameters()))


def test_adapters_are_loaded_over_their_base_by_peft(tmp_path: Path, nvme: Path) -> None:
    with _trained(
        OffloadTrainer, tmp_path / "run", _adapted(), nvme=nvme, host_memory=BUDGET
    ) as ours:
        ours.save_model(str(tmp_path / "adapters"))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapters")
    assert _equal(values_of(again), values_of(ours.model))


def test_adapters_saved_beside_a_model_leave_it_there(tmp_path: Path, nvme: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "both")
    with _trained(
        OffloadTrainer, tmp_path / "run", _adapted(), nvme=nvme, host_memory=BUDGET
    ) as ours:
        ours.save_model(str(tmp_path / "both"))
    assert {path.name for path in (tmp_path / "both").glob("*.safetensors")} == {
        "adapter_model.safetensors",
        "model.safetensors",
    }


def test_whole_model_saves_itself_while_it_is_offloaded(tmp_path: Path, nvme: Path) -> None:
    with _trained(
        OffloadTrainer, tmp_path / "run", tiny_llama(), nvme=nvme, host_memory=BUDGET
    ) as ours:
        ours.model.save_pretrained(tmp_path / "saved", safe_serialization=True)
        with pytest.raises(ValueError, match=r"save_pretrained\(variant='x'\) .* leave it out"):
            ours.model.save_pretrained(tmp_path / "saved", variant="x")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert _equal(dict(again.named_parameters()), dict(ours.model.named_parameters()))
    assert "save_pretrained" not in vars(ours.model)


class _Quantised(nn.Linear):
    """As a layer of bitsandbytes: eight bits a weight, and a scale for each row."""

    def __init__(self, plain: nn.Linear, *, in_buffer: bool) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        weight = (plain.weight.detach() / scale).round().to(torch.int8)
        del self.weight
        if in_buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.get_buffer("scale"))


def _quantised(*, in_buffer: bool) -> Any:
    model = tiny_llama()
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            plain = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, _Quantised(plain, in_buffer=in_buffer))
    torch.manual_seed(1)
    return get_peft_model(model, _lora(target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("in_buffer", [False, True])
def test_adapters_over_a_quantised_base_train_as_in_memory(
    tmp_path: Path, nvme: Path, in_buffer: bool
) -> None:
    def make() -> Any:
        return _quantised(in_buffer=in_buffer)

    options: dict[str, Any] = {"max_steps": 4, "eval_strategy": "no"}
    plain = train(Trainer, arguments(tmp_path / "plain", **options), model=make)
    more: dict[str, Any] = {"model": make, "nvme": nvme, "host_memory": BUDGET}
    args = arguments(tmp_path / "run", **options)
    assert_same(plain, train(OffloadTrainer, args, **more), except_logged=("grad_norm",))
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "last")
    again = train(OffloadTrainer, args, resume=True, **more)
    assert_same(plain, again, except_logged=("grad_norm",))
    saved = load_file(tmp_path / "last" / "adapter_model.safetensors")
    assert all("lora" in name for name in saved)


@pytest.mark.parametrize("trained", [["default"], ["second"], ["default", "second"]], ids=str)
def test_one_of_several_adapters_is_trained_and_saved_alone(
    nvme: Path, tmp_path: Path, trained: list[str]
) -> None:
    model = _adapted()
    model.add_adapter("second", _lora(r=2))
    model.base_model.set_adapter(trained)
    before = values_of(model)
    tokens = some_texts()["train_dataset"][0]["input_ids"][None]
    with infinity.offload(model, nvme, host_memory=BUDGET) as offloaded:
        model(input_ids=tokens, labels=tokens).loss.backward()
        offloaded.step()
        offloaded.save(tmp_path / "adapters", only_trainable=True)
    after = values_of(model)
    changed = {name for name in after if not same_bits(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == set(trained)
    other = _adapted()
    other.add_adapter("second", _lora(r=2))
    other.base_model.set_adapter(trained)
    with infinity.offload(other, nvme, host_memory=BUDGET) as offloaded:
        offloaded.load(tmp_path / "adapters")
    assert all(same_bits(values_of(other)[name], after[name]) for name in changed)
