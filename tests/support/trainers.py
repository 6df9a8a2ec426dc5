"""Small runs of transformers' trainers, in memory and offloaded, and what to compare of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import infinity
from tests.support.training import same_bits, values_of

VOCABULARY = 512
STEPS = 6
ROOT = Path(__file__).parents[2]


def tiny_llama() -> LlamaForCausalLM:
    """Its state takes several times the least budget."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def texts(count: int, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Random tokens, all of one length."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (count, 12), generator=rng)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def some_texts() -> dict[str, Any]:
    """What a trainer trains with and evaluates."""
    return {"train_dataset": texts(64), "eval_dataset": texts(8, seed=4)}


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    """Accumulation over 4 batches, a schedule, decay, evaluation and a save in the middle."""
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
    }
    return kind(**(chosen | options))


def least_of(kind: Callable[..., Any], **given: Any) -> int:
    """The least budget that this trainer works in."""
    trainer = kind(**given, host_memory=1)
    try:
        trainer.create_optimizer()
    except infinity.BudgetError as error:
        return error.least_host_bytes
    raise AssertionError("one byte of host memory was taken for enough")


def state_bytes_of(trained: Any, frozen: Any = None) -> int:
    """Bytes of weights, gradients and two moments in float32; of weights alone, if frozen."""
    rest = 0 if frozen is None else 4 * frozen.num_parameters()
    return 16 * int(trained.num_parameters()) + rest


@dataclass(frozen=True, slots=True)
class Run:
    """What was logged at each step (losses, norms, rates), and the weights in the end."""

    logged: list[dict[str, float]]
    values: Mapping[str, torch.Tensor]

    def without(self, *names: str) -> list[dict[str, float]]:
        """What was logged, but for these."""
        return [{k: v for k, v in entry.items() if k not in names} for entry in self.logged]


def train(
    kind: Callable[..., Any],
    args: Any,
    *,
    resume: Any = None,
    model: Callable[[], nn.Module] = tiny_llama,
    data: Any = None,
    **options: Any,
) -> Run:
    """Train ``model()`` to the end."""
    trained = model()
    data = some_texts() if data is None else data
    trainer = kind(model=trained, args=args, **data, **options)
    trainer.train(resume_from_checkpoint=resume)
    logged = logged_by(trainer)
    if hasattr(trainer, "close"):
        trainer.close()
    return Run(logged, values_of(trained))


_TIMES = ("_runtime", "_per_second", "_time", "total_flos")


def logged_by(trainer: Any) -> list[dict[str, float]]:
    """All but what depends on the time that it took."""
    return [
        {k: v for k, v in entry.items() if not k.endswith(_TIMES)}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]


def assert_same(first: Run, second: Run, *, except_logged: tuple[str, ...] = ()) -> None:
    """The same bits in all that was logged, and in every weight."""
    assert first.without(*except_logged) == second.without(*except_logged)
    assert first.values.keys() == second.values.keys()
    for name, value in first.values.items():
        assert same_bits(value, second.values[name]), name


class KillAt(TrainerCallback):
    """Kills the process, as a power cut would, when a step begins.

    What was saved behind training before the step ahead of it is on disk: a disk may be slower
    than a step.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint-save"):
                    thread.join()
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(call: str) -> None:
    """Run ``call`` (of a function, with its module) in a process that is to be killed in it."""
    module, _, rest = call.partition(":")
    function = rest.partition("(")[0]
    program = f"from {module} import {function}; {rest}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
