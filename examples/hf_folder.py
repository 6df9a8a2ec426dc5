"""What the examples for Hugging Face models share: a model without its weights, and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def model_without_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The causal LM that `folder` describes, its parameters on the meta device in `dtype`.

    The dtype is given here and not as `offload(compute_dtype=)`, which converts buffers as well:
    rotary frequencies stay in float32, as `from_pretrained(dtype=)` leaves them.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def weight_files(folder: Path) -> list[Path]:
    """The files that `from_pretrained` reads."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in `folder`, or None: then tokens are bytes."""
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(folder)
    return None


def encode(text: str, tokenizer: Any) -> torch.Tensor:
    """One row of tokens."""
    ids = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def decode(tokens: torch.Tensor, tokenizer: Any) -> str:
    ids = tokens.tolist()
    if tokenizer is None:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def batch_of_step(tokens: torch.Tensor, step: int, batch: int, sequence: int) -> torch.Tensor:
    """Rows cut from the text at random; the same ones for the same step, in whichever process."""
    if len(tokens) < sequence:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --sequence {sequence}")
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(tokens) - sequence + 1, (batch,), generator=generator).tolist()
    return torch.stack([tokens[start : start + sequence] for start in starts])
