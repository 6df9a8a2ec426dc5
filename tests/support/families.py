"""Families of models, each from its configuration in small, unchanged: what makes one, a batch for
it, and the loss of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import nn

VOCABULARY = 1024
WIDTH = 256
LAYERS = 3
HEADS = 4
LENGTH = 16
BATCH = 2
Batch = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""What most configurations of transformers call these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``package``: whose version its row names. ``generates``: whether it has ``generate``."""

    name: str
    kind: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[torch.Generator], Batch] = lambda rng: tokens(rng)
    loss: Callable[[nn.Module, Batch], torch.Tensor] = lambda model, batch: model(**batch).loss
    package: str = "transformers"
    generates: bool = False
    attention: str = "sdpa"

    def make(self) -> nn.Module:
        """With dropout on and the same weights every time."""
        torch.manual_seed(0)
        if self.package != "transformers":
            made: nn.Module = self.kind(**self.config)
            return made
        config = self.kind.config_class(**self.config)
        return self.kind._from_config(config, attn_implementation=self.attention).train()


def tokens(rng: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=rng)
    return {"input_ids": ids, "labels": ids.clone()}


def pairs(rng: torch.Generator) -> Batch:
    source, target = tokens(rng), tokens(rng)
    return {"input_ids": source["input_ids"], "labels": target["labels"]}


def images(rng: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=rng)
    return {"pixel_values": pixels, "labels": torch.randint(0, 16, (BATCH,), generator=rng)}


def captioned(rng: torch.Generator) -> Batch:
    return {
        "input_ids": tokens(rng)["input_ids"],
        "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=rng),
        "return_loss": torch.tensor(True),
    }


def sounds(rng: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 16, 64, generator=rng)
    return {"input_features": features, "labels": tokens(rng)["labels"]}


IMAGE_TOKEN = 3


def with_images(rng: torch.Generator) -> Batch:
    """A text whose first tokens stand for the patches of an image."""
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=rng)
    ids[:, :4] = IMAGE_TOKEN
    pixels = torch.randn(BATCH, 3, 32, 32, generator=rng)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels}


def noised(rng: torch.Generator, channels: int = 4) -> Batch:
    return {
        "sample": torch.randn(BATCH, channels, 16, 16, generator=rng),
        "timestep": torch.randint(0, 1000, (BATCH,), generator=rng),
        "noise": torch.randn(BATCH, channels, 16, 16, generator=rng),
    }


def of_class(rng: torch.Generator) -> Batch:
    labels = torch.randint(0, 16, (BATCH,), generator=rng)
    return {**noised(rng), "class_labels": labels}


def denoising_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    given = {name: value for name, value in batch.items() if name not in ("sample", "noise")}
    return F.mse_loss(model(batch["sample"], **given).sample, batch["noise"])


class Recurrent(nn.Module):
    """An LSTM over an embedding: packed weights, and parameters that a C kernel takes as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        logits: torch.Tensor = self.head(hidden)
        return logits


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["input_ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def causal(name: str, kind: Any, attention: str = "sdpa", /, **config: Any) -> Family:
    return Family(name=name, kind=kind, config=SIZES | config, generates=True, attention=attention)


GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": WIDTH // 2, "num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 16,
}
TRANSLATION: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_start_token_id": 0,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
T = transformers
FAMILIES = [
    Family(
        name="GPT-2",
        kind=T.GPT2LMHeadModel,
        config={
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        generates=True,
        attention="eager",
    ),
    causal("Llama", T.LlamaForCausalLM, attention_dropout=0.1),
    causal("Mistral", T.MistralForCausalLM, "eager", attention_dropout=0.1, **GROUPED),
    causal("Qwen 2", T.Qwen2ForCausalLM, attention_dropout=0.1, **GROUPED),
    causal("Qwen 3", T.Qwen3ForCausalLM, "eager", head_dim=64, **GROUPED),
    causal("Gemma 2", T.Gemma2ForCausalLM, "eager", head_dim=64, **GROUPED),
    causal("Gemma 3", T.Gemma3ForCausalLM, head_dim=64, **GROUPED),
    causal("Phi", T.PhiForCausalLM, resid_pdrop=0.1, embd_pdrop=0.1),
    causal("Falcon", T.FalconForCausalLM, "eager", hidden_dropout=0.1, attention_dropout=0.1),
    causal("OPT", T.OPTForCausalLM, ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    causal("Mixtral", T.MixtralForCausalLM, num_local_experts=4, **GROUPED),
    causal(
        *("Qwen 2 MoE", T.Qwen2MoeForCausalLM, "eager"),
        **{**GROUPED, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": WIDTH},
    ),
    causal(
        *("DeepSeek-V3", T.DeepseekV3ForCausalLM, "eager"),
        **{**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 64},
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
        first_k_dense_replace=1,
        num_key_value_heads=HEADS,
    ),
    Family(
        name="T5",
        kind=T.T5ForConditionalGeneration,
        config={
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 64,
            "d_ff": 2 * WIDTH,
            "num_layers": 2,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        batch=pairs,
        generates=True,
        attention="eager",
    ),
    Family(
        name="BART",
        kind=T.BartForConditionalGeneration,
        config=TRANSLATION | {"max_position_embeddings": 64},
        batch=pairs,
        generates=True,
    ),
    Family(name="BERT", kind=T.BertForMaskedLM, config=SIZES),
    Family(
        name="ViT",
        kind=T.ViTForImageClassification,
        config={**VISION, "num_labels": 16, "hidden_dropout_prob": 0.1},
        batch=images,
    ),
    Family(
        name="CLIP",
        kind=T.CLIPModel,
        config={
            "text_config": SIZES,
            "vision_config": VISION,
            "projection_dim": WIDTH,
        },
        batch=captioned,
    ),
    Family(
        name="Whisper",
        kind=T.WhisperForConditionalGeneration,
        config={
            **TRANSLATION,
            "num_mel_bins": 16,
            "dropout": 0.1,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        batch=sounds,
    ),
    Family(
        name="Mamba",
        kind=T.MambaForCausalLM,
        config={"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS},
        generates=True,
        attention="eager",
    ),
    Family(
        name="LLaVA",
        kind=T.LlavaForConditionalGeneration,
        config={
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
        },
        batch=with_images,
    ),
    Family(
        name="UNet",
        kind=diffusers.UNet2DModel,
        config={
            "sample_size": 16,
            "in_channels": 16,
            "out_channels": 16,  # a bias of fewer is not what torch's kernel rounds as ours
            "layers_per_block": 1,
            "block_out_channels": (64, 128),
            "norm_num_groups": 16,
            "dropout": 0.1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        batch=partial(noised, channels=16),
        loss=denoising_loss,
        package="diffusers",
    ),
    Family(
        name="DiT",
        kind=diffusers.DiTTransformer2DModel,
        config={
            "num_attention_heads": HEADS,
            "attention_head_dim": 64,
            "num_layers": 2,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 16,
            "patch_size": 2,
            "num_embeds_ada_norm": 16,
            "dropout": 0.1,
            "norm_num_groups": 2,
        },
        batch=of_class,
        loss=denoising_loss,
        package="diffusers",
    ),
    Family(name="LSTM", kind=Recurrent, loss=next_token_loss, package="torch"),
]
