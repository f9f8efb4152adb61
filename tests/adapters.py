"""A tiny model with PEFT adapters of every kind that is supported."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from models import tiny_model

OPTIONS: dict[str, dict[str, Any]] = {
    "adalora": {"total_step": 10, "init_r": 4, "target_r": 2},
    "boft": {"boft_block_size": 8},
    "c3a": {"block_size": 8},
    "fourierft": {"n_frequency": 50},
    "gralora": {"gralora_k": 2, "r": 4},
    "ia3": {"feedforward_modules": ["down_proj"]},
    "ln_tuning": {"target_modules": ["input_layernorm"]},
    "miss": {"r": 8},
    "oft": {"oft_block_size": 8, "r": 0},
    "road": {"group_size": 8},
    "trainable_tokens": {"target_modules": ["embed_tokens"], "token_indices": [357, 260, 281]},
    "vblora": {"vector_length": 8, "num_vectors": 64, "topk": 2, "r": 4},
    "waveft": {"n_frequency": 50},
}


def config_of(kind: str, **options: Any) -> Any:
    """Return a small configuration of an adapter."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    modules = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    return kinds[kind](task_type="CAUSAL_LM", **{**modules, **OPTIONS.get(kind, {}), **options})


def with_adapters(*names: str, kind: str = "lora", model: Any = None, **options: Any) -> Any:
    """Return a tiny model with adapters, random and unlike each other; the first is active."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_of(kind, **options)
        wrapped = get_peft_model(tiny_model() if model is None else model, config, adapter_name=names[0])
        for name in names[1:]:
            wrapped.add_adapter(name, config)
        generator = torch.Generator().manual_seed(len(kind))
        for name, parameter in wrapped.named_parameters():
            if any(part in name.split(".") for part in names):
                parameter.data.normal_(0, 0.2, generator=generator)
        wrapped.set_adapter(names[0])
    return wrapped.eval()
