"""A tiny random model of any decoder type that transformers knows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes under the names that configurations use for them; each takes those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "sliding_window": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "query_pre_attn_scalar": 16,
}

# Behind layers of both kinds, two that attend to their KV; a small input of its own for every layer.
_SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 49152,
}
_GRANITE = {
    "embedding_multiplier": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")

# What a type needs besides.
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    **{kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in _LATENT},
    "dots1": {"n_shared_experts": 1},
    **dict.fromkeys(("gemma3_text", "laguna", "mellum"), _WINDOWS),
    "qwen2": {"use_sliding_window": False},
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "granite_swa", "granitemoe_swa"), _GRANITE),
    # As Granite 4.0 is without Mamba layers.
    "granitemoehybrid": {
        **_GRANITE,
        "layer_types": ["full_attention"] * 4,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 48,
        "num_local_experts": 4,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma3n_text": {**_SHARING, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0] * 3},
    # All that Gemma 4 models have, in one: other heads and widths in full attention, whose values are its keys.
    "gemma4_text": {
        **_SHARING,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified_text": {
        **{name: value for name, value in _SHARING.items() if "per_layer" not in name},
        "global_head_dim": 32,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "cohere_compass_text": {
        **_WINDOWS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
        "logit_scale": 2.0,
    },
    "mimo_v2_flash": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "head_dim": 24,
        "v_head_dim": 16,
    },
}


# Models that also see images, by the type of their text model; their rotation has three axes, which coincide in text.
_SEEING = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
_ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_VISION = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 32, "num_heads": 2,
    "num_attention_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def seeing_config(kind: str, text_kind: str, **options: Any) -> Any:
    """Return the configuration of a tiny model that also sees images."""
    text = {"model_type": text_kind, **settings_of(text_kind), **options}
    config = CONFIG_MAPPING[kind]()
    if config.vision_config is None:
        return CONFIG_MAPPING[kind](text_config=text)
    vision = config.vision_config.to_dict()
    sizes = {name: value for name, value in _VISION.items() if name in vision}
    return CONFIG_MAPPING[kind](text_config=text, vision_config={"model_type": vision["model_type"], **sizes})


def settings_of(kind: str) -> dict[str, Any]:
    """Return the settings of a type's configuration."""
    known = CONFIG_MAPPING[kind]().to_dict()
    return {name: value for name, value in _SIZES.items() if name in known} | _SPECIAL.get(kind, {})


def tiny_model(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Build a small model of a type with random float32 weights."""
    if kind in _SEEING:
        config = seeing_config(_SEEING[kind], kind, rope_parameters=_ROTATION, **options)
        return _initialised(AutoModelForImageTextToText, config, seed)
    return _initialised(AutoModelForCausalLM, CONFIG_MAPPING[kind](**{**settings_of(kind), **options}), seed)


def _initialised(auto: Any, config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = auto.from_config(config)
    # Fresh weights attend almost evenly; sharper attention makes a wrong position or mask visible.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value")):
                parameter.mul_(8.0)
            elif parameter.ndim >= 2:
                parameter.mul_(3.0)
            elif "sinks" in name or "correct_output_scale" in name:
                parameter.normal_()
    return model.eval()
