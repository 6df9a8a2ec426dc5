"""Decoder layers of transformers that torch.compile has compiled, beside the same in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

import infinity
from infinity.integrations.transformers import OffloadTrainer
from tests.support.compiled import QUIET, WAYS, Graphs
from tests.support.families import FAMILIES, Family
from tests.support.proof import matrix
from tests.support.trainers import arguments, texts, tiny_llama
from tests.support.training import Plain, least_budget, same_bits

pytestmark = QUIET
STEPS = 4
LR = 1e-3
LLAMA = next(family for family in FAMILIES if family.kind.__name__ == "LlamaForCausalLM")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(way: str, graphs: Graphs, *, checkpointed: bool) -> Any:
    model: Any = LLAMA.make()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    WAYS[way](model.model.layers, graphs)
    return model


def losses_of(model: Any, step: int, family: Family = LLAMA) -> list[float]:
    """Of a training pass, and of one of evaluation."""
    batch = family.batch(torch.Generator().manual_seed(step))
    loss = family.loss(model, batch)
    loss.backward()
    with torch.no_grad():
        evaluated = family.loss(model.eval(), batch)
    model.train()
    return [loss.item(), evaluated.item()]


@pytest.mark.parametrize("way", matrix(WAYS, usual=["torch.compile(layer)"]))
def test_a_trainer_of_a_model_with_compiled_layers_trains_to_the_bits_of_memory(
    way: str, nvme: Path, tmp_path: Path
) -> None:
    trained = []
    within: dict[str, Any] = {"nvme": nvme, "host_memory": "1GiB"}
    kinds: list[tuple[Any, dict[str, Any]]] = [(Trainer, {}), (OffloadTrainer, within)]
    for kind, options in kinds:
        torch.compiler.reset()
        model = tiny_llama()
        WAYS[way](model.model.layers, Graphs("eager"))
        chosen = {"max_steps": 2, "eval_strategy": "no", "save_steps": 2}
        args = arguments(tmp_path / kind.__name__, **chosen)
        trainer: Any = kind(model=model, args=args, train_dataset=texts(16), **options)
        trainer.train()
        if kind is OffloadTrainer:
            trainer.close()
        trained.append({name: p.detach() for name, p in model.named_parameters()})
    assert all(same_bits(value, trained[1][name]) for name, value in trained[0].items())
    saved = load_file(tmp_path / "OffloadTrainer" / "checkpoint-2" / "model.safetensors")
    assert saved.keys() == {name for name, _ in tiny_llama().named_parameters()}


@pytest.mark.parametrize(
    ("way", "backend", "checkpointed", "dtype"),
    matrix(
        [
            *product(WAYS, ["aot_eager"], [False], [BF16]),
            *product(WAYS, ["aot_eager"], [True], [None]),
            ("layer.compile()", "inductor", False, BF16),
            ("torch.compile(layer)", "inductor", True, None),
        ],
        usual=[
            ("torch.compile(layer)", "aot_eager", False, BF16),
            ("layer.compile()", "aot_eager", True, None),
        ],
    ),
)
def test_compiled_decoder_layers_train_to_the_bits_of_memory(
    way: str, backend: str, checkpointed: bool, dtype: torch.dtype | None, nvme: Path
) -> None:
    graphs = Graphs(backend)
    make = partial(made, way, graphs, checkpointed=checkpointed)
    plain = Plain(make(), partial(torch.optim.AdamW, lr=LR, fused=True), dtype=dtype)
    losses = []
    for step in range(STEPS):
        losses += losses_of(plain.model, step)
        plain.step()
    num_graphs, graphs.count = graphs.count, 0
    torch.compiler.reset()
    options: dict[str, Any] = {"compute_dtype": dtype, "optimizer": infinity.AdamW(lr=LR)}
    model = make()
    found: list[float] = []
    counts: list[int] = []
    least = least_budget(make, nvme, **options)
    with infinity.offload(model, nvme, host_memory=least, **options) as offloaded:
        for step in range(STEPS):
            found += losses_of(model, step)
            offloaded.step()
            counts.append(graphs.count)
        assert offloaded.report().read_bytes > 0
    assert found == losses
    assert counts[1:] == [num_graphs] * (STEPS - 1)
    trained = dict(model.named_parameters())
    assert trained.keys() >= plain.masters.keys()
    for name, master in plain.masters.items():
        assert same_bits(trained[name].detach(), master.detach()), name
