"""Options that offloading cannot honour are refused by name, before there is even a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

from infinity.integrations.transformers import (
    OffloadArguments,
    OffloadArgumentsMixin,
    OffloadMixin,
    OffloadTrainer,
)
from tests.support.trainers import arguments, tiny_llama


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True .* compute_dtype='bfloat16'"),
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' .* adamw_torch_fused"),
        ({"optim": "galore_adamw", "optim_target_modules": ["mlp"]}, "optim='galore_adamw'"),
        ({"torch_compile": True}, "torch_compile=True .* remove it"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, "activations='host'"),
    ],
    ids=str,
)
def test_option_is_refused_with_its_remedy(
    tmp_path: Path, nvme: Path, options: dict[str, Any], said: str
) -> None:
    args = arguments(tmp_path / "run", **options)
    with pytest.raises(ValueError, match=said):
        OffloadTrainer(model=None, args=args, nvme=nvme)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsdp", ["full_shard"]),
        ("deepspeed", {"zero_optimization": {}}),
        ("fp16", True),
        ("fp16_full_eval", True),
        ("parallelism_config", object()),
        ("use_vllm", True),
        ("activation_offloading", True),
        ("sync_ref_model", True),
        ("teacher_model_kind", "ema"),
    ],
)
def test_option_that_this_machine_cannot_even_set_is_refused(
    tmp_path: Path, nvme: Path, name: str, value: Any
) -> None:
    args = arguments(tmp_path / "run")
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"^{name}="):
        OffloadTrainer(model=None, args=args, nvme=nvme)


def test_several_gpus_are_refused(tmp_path: Path, nvme: Path) -> None:
    args = arguments(tmp_path / "run")
    assert args.n_gpu <= 1  # it is counted when it is first asked for
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"n_gpu=2: .*DataParallel"):
        OffloadTrainer(model=None, args=args, nvme=nvme)


def test_optimizer_over_all_parameters_at_once_is_refused(tmp_path: Path, nvme: Path) -> None:
    trainer = OffloadTrainer(
        tiny_llama(),
        arguments(tmp_path / "run", eval_strategy="no"),
        optimizer_cls_and_kwargs=(_Coupled, {"lr": 0.1}),
        nvme=nvme,
        host_memory="64MiB",
    )
    with pytest.raises(ValueError, match="_Coupled"):
        trainer.create_optimizer()


class _Coupled(torch.optim.SGD):
    """Every step depends on the gradients of all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        total = torch.stack([g.norm() for g in grads if g is not None]).norm()
        for grad in grads:
            if grad is not None:
                grad.div_(total * len(grads))
        super().step()


def test_place_for_state_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nvme is missing: .*OffloadArguments"):
        OffloadTrainer(model=None, args=arguments(tmp_path / "run"))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"compute_dtype": "half a float"}, "compute_dtype='half a float'"),
        ({"state_dtype": "nothing"}, "state_dtype='nothing'"),
        ({"activations": "drop"}, "activations='drop'"),
    ],
    ids=str,
)
def test_arguments_refuse_what_offload_does_not_know(
    tmp_path: Path, option: dict[str, Any], said: str
) -> None:
    kind: Any = OffloadArguments
    with pytest.raises(ValueError, match=said):
        kind(output_dir=str(tmp_path), use_cpu=True, nvme=[str(tmp_path)], **option)


def test_options_are_read_from_a_command_line(tmp_path: Path) -> None:
    line = f"--output_dir {tmp_path} --use_cpu --nvme /a /b --host_memory 8GiB"
    kind: Any = OffloadArguments
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(line.split())
    assert (args.nvme, args.host_memory, args.activations) == (["/a", "/b"], "8GiB", "keep")


def test_no_option_hides_one_of_the_trainer() -> None:
    own = set(OffloadArgumentsMixin.__dataclass_fields__)
    assert own & set(TrainingArguments.__dataclass_fields__) == set()


def test_class_of_arguments_becomes_a_dataclass_by_itself(tmp_path: Path) -> None:
    class Own(OffloadArgumentsMixin, TrainingArguments):
        extra: int = 3

    kind: Any = Own
    args = kind(output_dir=str(tmp_path), use_cpu=True, nvme=str(tmp_path), extra=4)
    assert (args.nvme, args.extra) == ([str(tmp_path)], 4)


def test_mixin_behind_the_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="OffloadMixin goes first"):
        type("Wrong", (Trainer, OffloadMixin), {})
