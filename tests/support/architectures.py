"""Tiny models of Hugging Face, one for each way in which first values are made or stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hub

_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_SPEECH: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_AUDIO: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def _qwen2_moe() -> Any:
    return hub.Qwen2MoeConfig(
        **_TEXT,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def _t5() -> Any:
    return hub.T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    text = _TEXT | {"num_key_value_heads": 2, "rope_parameters": _MROPE}
    return hub.Qwen2VLConfig(text_config=text, vision_config=vision)


def _llava() -> Any:
    text = hub.LlamaConfig(**_TEXT)
    vision = hub.CLIPVisionConfig(**_VISION)
    return hub.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)


ARCHITECTURES: dict[str, Callable[[], hub.PreTrainedModel]] = {
    "llama, tied": lambda: hub.LlamaForCausalLM(
        hub.LlamaConfig(**_TEXT, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "gpt2": lambda: hub.GPT2LMHeadModel(
        hub.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "mixtral": lambda: hub.MixtralForCausalLM(
        hub.MixtralConfig(**_TEXT, num_key_value_heads=2, num_local_experts=4)
    ),
    "qwen2 moe": lambda: hub.Qwen2MoeForCausalLM(_qwen2_moe()),
    "deepseek v3": lambda: hub.DeepseekV3ForCausalLM(hub.DeepseekV3Config(**_TEXT, **_EXPERTS)),
    "t5": lambda: hub.T5ForConditionalGeneration(_t5()),
    "modernbert": lambda: hub.ModernBertForMaskedLM(
        hub.ModernBertConfig(**_TEXT, cls_token_id=0, sep_token_id=1)
    ),
    "vit": lambda: hub.ViTForImageClassification(hub.ViTConfig(**_VISION)),
    "vit mae": lambda: hub.ViTMAEForPreTraining(
        hub.ViTMAEConfig(
            **_VISION,
            decoder_hidden_size=16,
            decoder_intermediate_size=24,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
        )
    ),
    "clip": lambda: hub.CLIPModel(
        hub.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=16)
    ),
    "siglip": lambda: hub.SiglipModel(hub.SiglipConfig(text_config=_TEXT, vision_config=_VISION)),
    "whisper": lambda: hub.WhisperForConditionalGeneration(hub.WhisperConfig(**_SPEECH)),
    "wav2vec2": lambda: hub.Wav2Vec2ForCTC(hub.Wav2Vec2Config(**_AUDIO)),
    "mamba": lambda: hub.MambaForCausalLM(
        hub.MambaConfig(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2)
    ),
    "llava": lambda: hub.LlavaForConditionalGeneration(_llava()),
    "qwen2 vl": lambda: hub.Qwen2VLForConditionalGeneration(_qwen2_vl()),
}
