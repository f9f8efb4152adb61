"""Tiny random models of every verified architecture, and the embedded tokenizer."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fused_kv_llm.engine import parts
from fused_kv_llm.model.embedded import embedded_model_folder
from fused_kv_llm.prompt import PromptRenderer

ARCHITECTURES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


_BUILT: dict[str, tuple[PreTrainedModel, Tensor]] = {}
_MOST_BUILT = 12


def tiny_model(architecture: str = "llama", rope: str = "default", seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a three-layer model with grouped heads and random float32 weights, which is the caller's own.

    It is a copy of one that is built once: to draw weights takes five times as long. What is drawn afterwards is the
    same either way.
    """
    wanted = repr((architecture, rope, seed, sorted(options.items())))
    if wanted not in _BUILT:
        while len(_BUILT) >= _MOST_BUILT:
            del _BUILT[next(iter(_BUILT))]
        _BUILT[wanted] = _build(architecture, rope, seed, options), torch.get_rng_state()
    built, state_after = _BUILT[wanted]
    torch.set_rng_state(state_after)
    return copy.deepcopy(built)


def _build(architecture: str, rope: str, seed: int, options: dict[str, Any]) -> PreTrainedModel:
    config_type, model_type = ARCHITECTURES[architecture]
    settings: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": dict(ROPES[rope]),
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    if architecture == "qwen3":
        settings["head_dim"] = 8
    torch.manual_seed(seed)
    model: PreTrainedModel = model_type(config_type(**{**settings, **options}))
    # Fresh weights attend almost evenly; sharper attention makes a wrong position or mask visible.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                parameter.mul_(12.0)
            elif parameter.ndim == 2:
                parameter.mul_(3.0)
    return model.eval()


@cache
def smollm2_tokenizer() -> Any:
    """Return SmolLM2's tokenizer, whose copy for engines is made once; nobody is to change it."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder("smollm2-135m"))
    _share_renderers_of(tokenizer)
    return tokenizer


def _share_renderers_of(tokenizer: Any) -> None:
    """Let engines with this tokenizer share a renderer, which is never changed: to make one takes half a second."""

    @cache
    def shared(template: str, wrap_chat_template: bool) -> PromptRenderer:
        return PromptRenderer(tokenizer, wrap_chat_template=wrap_chat_template)

    def renderer(of: Any, *, wrap_chat_template: bool) -> PromptRenderer:
        if of is tokenizer:
            return shared(tokenizer.chat_template, wrap_chat_template)
        return PromptRenderer(of, wrap_chat_template=wrap_chat_template)

    parts.PromptRenderer = renderer  # type: ignore[attr-defined, assignment]
