"""Small models, tokenizers and data with the names that tests of transformers ask a hub for.

They are written as folders into the root of a checkout, from where its tests run: a name that is a
folder there is not looked for elsewhere. Weights and texts are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_VOCABULARY = 1024
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXTS = 400


def write_stand_ins(checkout: Path) -> None:
    """Write all of them into ``checkout``; what it has of an earlier call is replaced."""
    torch.manual_seed(0)
    known: Any = transformers
    llama = known.LlamaConfig(**_SMALL, bos_token_id=1, eos_token_id=2)
    folder = checkout / "hf-internal-testing" / "tiny-random-LlamaForCausalLM"
    known.LlamaForCausalLM(llama).save_pretrained(folder)
    _tokenizer(bos="<s>", eos="</s>", pad="<pad>", unk="<unk>").save_pretrained(folder)
    folder = checkout / "trl-internal-testing" / "tiny-Qwen2ForCausalLM-2.5"
    qwen = known.Qwen2Config(**_SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    known.Qwen2ForCausalLM(qwen).save_pretrained(folder)
    _tokenizer(eos="<|im_end|>", pad="<|endoftext|>", unk="<unk>").save_pretrained(folder)
    for name in ("bert-base-cased", "bert-base-uncased", "google-bert/bert-base-uncased"):
        bert = known.BertForSequenceClassification(known.BertConfig(**_SMALL))
        bert.save_pretrained(checkout / name)
        own = _tokenizer(bos="[CLS]", eos="[SEP]", pad="[PAD]", unk="[UNK]", others=["[MASK]"])
        own.save_pretrained(checkout / name)
    known.Wav2Vec2FeatureExtractor().save_pretrained(checkout / "facebook/wav2vec2-base-960h")
    _write_texts(checkout / "Salesforce" / "wikitext", "wikitext-2-raw-v1")


def _sentence(number: int) -> str:
    return " ".join(f"word{(number * 7 + place * place) % 97}" for place in range(12 + number % 20))


def _tokenizer(
    *, eos: str, pad: str, unk: str, bos: str | None = None, others: Sequence[str] = ()
) -> Any:
    made = Tokenizer(models.BPE(unk_token=unk))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(others) - 64,
        special_tokens=[token for token in (pad, bos, eos, unk, *others) if token is not None],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(map(_sentence, range(_TEXTS)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unk,
        model_max_length=64,
    )


def _write_texts(folder: Path, configuration: str) -> None:
    (folder / configuration).mkdir(parents=True, exist_ok=True)
    texts = datasets.Dataset.from_dict({"text": [_sentence(n) for n in range(_TEXTS)]})
    texts.to_parquet(str(folder / configuration / "train-00000-of-00001.parquet"))
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        f"- config_name: {configuration}\n"
        "  data_files:\n  - split: train\n"
        f"    path: {configuration}/train-*\n---\n"
    )
