"""Trainers of TRL over a model that has adapters already: TRL copies them to a reference adapter,
and makes that active for reference passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from infinity.integrations import trl as offloaded_trl
from infinity.integrations.transformers import OffloadMixin, OffloadTrainer
from tests.support.trainers import Run, arguments, assert_same, logged_by, some_texts, tiny_llama
from tests.support.training import values_of
from tests.support.trl_runs import case

BUDGET = "64MiB"
NOT_ALIKE = ("num_tokens", "eval_num_tokens", "grad_norm")
SHORT: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


def _adapted() -> Any:
    model = tiny_llama()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def _trained(name: str, folder: Path, model: Any, kind: Any = None, **more: Any) -> Any:
    plain, given = case(name, folder, **SHORT, **({"beta": 0.1} if name != "SFT" else {}))
    given.pop("ref_model", None)
    trainer = (plain if kind is None else kind)(**given | {"model": model}, **more)
    torch.manual_seed(2)
    trainer.train()
    return trainer


def _run(trainer: Any) -> Run:
    if isinstance(trainer, OffloadMixin):
        trainer.close()
    return Run(logged_by(trainer), values_of(trainer.model))


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_model_with_adapters_is_trained_beside_its_reference_adapter(
    tmp_path: Path, nvme: Path, name: str
) -> None:
    plain = _run(_trained(name, tmp_path / "plain", _adapted()))
    kind = getattr(offloaded_trl, f"Offload{name}Trainer")
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    ours = _run(_trained(name, tmp_path / "ours", _adapted(), kind, **more))
    assert any(".ref." in key for key in plain.values)
    assert_same(plain, ours, except_logged=NOT_ALIKE)


def test_second_trainer_goes_on_with_the_adapters_of_the_first(tmp_path: Path, nvme: Path) -> None:
    first = _trained("SFT", tmp_path / "plain", _adapted())
    plain = _run(_trained("DPO", tmp_path / "plain", first.model))
    more: dict[str, Any] = {"nvme": nvme, "host_memory": BUDGET}
    first = _trained("SFT", tmp_path / "a", _adapted(), offloaded_trl.OffloadSFTTrainer, **more)
    kind = offloaded_trl.OffloadDPOTrainer
    ours = _run(_trained("DPO", tmp_path / "b", first.model, kind, **more))
    assert_same(plain, ours, except_logged=NOT_ALIKE)


def test_adapter_that_is_not_trained_can_be_evaluated_between(tmp_path: Path, nvme: Path) -> None:
    runs, losses = [], []
    kinds: tuple[tuple[Path, Any, dict[str, Any]], ...] = (
        (tmp_path / "plain", Trainer, {}),
        (tmp_path / "ours", OffloadTrainer, {"nvme": nvme, "host_memory": BUDGET}),
    )
    for folder, kind, more in kinds:
        model = _adapted()
        model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"]))
        trainer = kind(model, arguments(folder, **SHORT), **some_texts(), **more)
        trainer.train()
        model.set_adapter("second")
        losses.append(trainer.evaluate()["eval_loss"])
        assert model.get_parameter(_LAYER.format("second")).requires_grad
        model.set_adapter("default")
        trainer.train()
        runs.append(_run(trainer))
    assert losses[0] == losses[1]
    assert_same(*runs, except_logged=NOT_ALIKE)


_LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.{}.weight"
