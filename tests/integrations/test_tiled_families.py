"""Families of transformers whose table is larger than the budget, in tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from infinity.integrations.transformers.model_files.weights import read_folder
from tests.support.models import seeded
from tests.support.training import (
    WHOLE,
    assert_same_runs,
    least_budget,
    same_values,
    train,
    values_of,
)

WORDS, WIDTH, TILE = 18_000, 256, 1 << 20


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=1,
        n_head=4,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=64,
        d_ff=256,
        num_layers=1,
        num_heads=4,
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def loss_of(model: Any, step: int) -> torch.Tensor:
    drawn = torch.randint(3, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(input_ids=drawn, labels=drawn).loss
    return loss


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_family_whose_table_is_larger_than_the_budget_trains_as_in_memory(
    make: Callable[[], nn.Module], nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    least = least_budget(make, nvme, max_parameter_bytes=TILE)
    assert least < WORDS * WIDTH * 4
    with caplog.at_level(logging.WARNING):
        runs = {
            name: train(make, loss_of, nvme, host_memory=budget, steps=2, max_parameter_bytes=TILE)
            for name, budget in (("whole", WHOLE), ("least", least))
        }
    assert_same_runs(runs)
    assert not any("tile" in record.message for record in caplog.records)
    plain = train(make, loss_of, nvme, host_memory=WHOLE, steps=2)
    assert torch.tensor(plain.losses).allclose(torch.tensor(runs["least"].losses))


def test_folder_of_plain_weights_is_read_into_tiles(nvme: Path, tmp_path: Path) -> None:
    source: Any = seeded(llama, 1)
    source.save_pretrained(tmp_path / "source")
    model: Any = seeded(llama)
    tokens = torch.tensor([[1, 5, 17_999]])
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=TILE) as offloaded:
        assert not read_folder(offloaded, tmp_path / "source")
        found = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    expected = source.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(found, expected)
    assert same_values(values_of(model), values_of(source))
