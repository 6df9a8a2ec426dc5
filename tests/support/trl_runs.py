"""Small runs of TRL's trainers: a tokenizer and data that are made in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.trainers import VOCABULARY, arguments, tiny_llama

_SPECIAL = ["<s>", "</s>", "<pad>"]
WORDS = [f"w{number}" for number in range(VOCABULARY - len(_SPECIAL))]


def tokenizer() -> Any:
    """One token a word; ids as ``tiny_llama`` expects them."""
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _text(start: int, count: int = 6) -> str:
    return " ".join(WORDS[(start * 7 + step * 3) % len(WORDS)] for step in range(count))


def sentences(count: int) -> Dataset:
    return Dataset.from_list([{"text": _text(number, 10)} for number in range(count)])


def preferences(count: int) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": _text(number),
                "chosen": " " + _text(number + 100),
                "rejected": " " + _text(number + 200, 5),
            }
            for number in range(count)
        ]
    )


def prompts(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": _text(number)} for number in range(count)])


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many words of a completion have an even number."""
    return [sum(int(w[1:]) % 2 == 0 for w in c.split() if w[1:].isdigit()) for c in completions]


def case(name: str, folder: Path, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The class of a trainer and what it is made with, but for options of offload."""
    trainer, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    options: dict[str, Any] = {"bf16": False, "max_steps": 4, **more}
    given: dict[str, Any] = {"model": tiny_llama(), "processing_class": tokenizer()}
    if name == "SFT":
        given |= {"train_dataset": sentences(32), "eval_dataset": sentences(4)}
        return trainer, given | {"args": arguments(folder, config, **options)}
    if name == "DPO":
        given |= {"train_dataset": preferences(32), "eval_dataset": preferences(4)}
        given |= {"ref_model": tiny_llama()}
        return trainer, given | {"args": arguments(folder, config, **options)}
    assert name == "GRPO"
    options |= {
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    given |= {"train_dataset": prompts(32), "eval_dataset": prompts(4)}
    given |= {"reward_funcs": even_words}
    return trainer, given | {"args": arguments(folder, config, **options)}
