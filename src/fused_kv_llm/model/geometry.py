"""Which models can be fused, and the numbers that moving their KV needs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.errors import UnsupportedModelError

__all__ = ["MOVABLE_ROPE_TYPES", "SUPPORTED_MODEL_TYPES", "Geometry", "check_model_type", "read_geometry"]

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "phi3")
MOVABLE_ROPE_TYPES = ("default", "llama3", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and rotary frequencies of a decoder.

    Parameters
    ----------
    num_layers, num_heads, num_kv_heads, head_dim : int
        Attention shapes.
    inv_freq : Tensor
        float32 ``[rotary / 2]`` on the CPU; half-split layout.
    rope_digest : str
        SHA-256 of everything that positions depend on.
    context_length : int
        Longest prompt plus answer, in tokens.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Tensor
    rope_digest: str
    context_length: int

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _refuse(model_id: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model {model_id!r} is not supported: {reason}. Supported are decoders of type "
        f"{', '.join(SUPPORTED_MODEL_TYPES)} with full attention in every layer and rotary positions of type "
        f"{', '.join(MOVABLE_ROPE_TYPES)}."
    )


def _check_layers(config: Any, model_id: str) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        others = ", ".join(sorted(layer_types - {"full_attention"}))
        raise _refuse(model_id, f"it has layers of type {others}, whose KV depends on more than the chunk")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise _refuse(model_id, f"it attends through a sliding window of {window} tokens")


def check_model_type(config: Any, model_id: str) -> None:
    """Refuse an architecture that has not been verified.

    Parameters
    ----------
    config : transformers.PretrainedConfig
    model_id : str
        The model's name, for messages.

    Raises
    ------
    UnsupportedModelError
    """
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise _refuse(model_id, f"its type {config.model_type!r} has not been verified")


def read_geometry(model: Any, model_id: str) -> Geometry:
    """Check that a model's KV can be moved and read the numbers for it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    model_id : str
        Its name, for messages.

    Returns
    -------
    Geometry

    Raises
    ------
    UnsupportedModelError
        If rotation does not compose (dynamic NTK, LongRoPE), a layer does not attend to everything before
        it, or the architecture has not been verified. Nothing is silently approximate.
    """
    config = model.config
    check_model_type(config, model_id)
    _check_layers(config, model_id)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or not isinstance(getattr(rotary, "inv_freq", None), Tensor):
        raise _refuse(model_id, "it has no rotary position embedding")
    if rotary.rope_type not in MOVABLE_ROPE_TYPES:
        raise _refuse(model_id, f"rotations of type {rotary.rope_type!r} change with the prompt's length")
    inv_freq = rotary.inv_freq.detach().to("cpu", torch.float32)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    described = {
        "type": rotary.rope_type,
        "scaling": float(rotary.attention_scaling),
        "inv_freq": hashlib.sha256(inv_freq.numpy().tobytes()).hexdigest(),
        "head_dim": head_dim,
    }
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        inv_freq=inv_freq,
        rope_digest=hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        context_length=int(config.max_position_embeddings),
    )
