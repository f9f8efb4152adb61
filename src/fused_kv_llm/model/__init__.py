"""The only seam to transformers: loading, attention, cache and positions."""

from __future__ import annotations

from fused_kv_llm.model.attention import ATTENTION_NAME
from fused_kv_llm.model.embedded import EMBEDDED_MODELS, embedded_model_folder

from .attention import AttentionPass, no_mask
from .buffers import BufferPool
from .cache import BatchCache, FusedCache
from .forward import (
    KVPass,
    PrefixKV,
    RowPass,
    StopForwardError,
    compute_prefix,
    forward_kv,
    forward_rows,
)
from .geometry import Geometry, read_geometry
from .loading import LoadedModel, choose_device, choose_dtype, load_model
from .packed import PackedChunk, prefill_packed

__all__ = [
    "ATTENTION_NAME",
    "EMBEDDED_MODELS",
    "AttentionPass",
    "BatchCache",
    "BufferPool",
    "FusedCache",
    "Geometry",
    "KVPass",
    "LoadedModel",
    "PackedChunk",
    "PrefixKV",
    "RowPass",
    "StopForwardError",
    "choose_device",
    "choose_dtype",
    "compute_prefix",
    "embedded_model_folder",
    "forward_kv",
    "forward_rows",
    "load_model",
    "no_mask",
    "prefill_packed",
    "read_geometry",
]
