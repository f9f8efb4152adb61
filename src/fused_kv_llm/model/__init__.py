"""The only seam to transformers: loading, attention, cache and positions."""

from __future__ import annotations

from .attention import ATTENTION_NAME
from .attention_rule import AttentionRule
from .attention_weights import attention_weights
from .cache import BatchCache, FusedCache
from .cache_pool import CachePool
from .decoder_stack import may_pause
from .eight_bit import EightBitLinears, eight_bit_of
from .embedded import EMBEDDED_MODELS, embedded_model_folder
from .forward import PrefixKV, compute_prefix, forward_kv, forward_rows, pause_at
from .forward_pass import ForwardPass, KVPass, LayerFiller
from .geometry import Geometry, KVShape, Rotation
from .loading import LoadedModel, choose_device, choose_dtype, has_native_bfloat16, load_model
from .lock import ModelLock, lock_of
from .narrowing import NarrowingPass
from .numbers import check_numbers
from .of_model import OfModel
from .owner import ModelOwner, PieceSpeed, StoppedError
from .packed import PackedChunk, prefill_packed
from .pass_context import StopForwardError
from .pausing import PausedError
from .ragged import RaggedError, forward_ragged
from .ragged_part import RaggedPart
from .reference import compare_reference, compute_reference, measure_noise
from .view_cache import ViewCache

__all__ = [
    "ATTENTION_NAME",
    "EMBEDDED_MODELS",
    "AttentionRule",
    "BatchCache",
    "CachePool",
    "EightBitLinears",
    "ForwardPass",
    "FusedCache",
    "Geometry",
    "KVPass",
    "KVShape",
    "LayerFiller",
    "LoadedModel",
    "ModelLock",
    "ModelOwner",
    "NarrowingPass",
    "OfModel",
    "PackedChunk",
    "PausedError",
    "PieceSpeed",
    "PrefixKV",
    "RaggedError",
    "RaggedPart",
    "Rotation",
    "StopForwardError",
    "StoppedError",
    "ViewCache",
    "attention_weights",
    "check_numbers",
    "choose_device",
    "choose_dtype",
    "compare_reference",
    "compute_prefix",
    "compute_reference",
    "eight_bit_of",
    "embedded_model_folder",
    "forward_kv",
    "forward_ragged",
    "forward_rows",
    "has_native_bfloat16",
    "load_model",
    "lock_of",
    "may_pause",
    "measure_noise",
    "pause_at",
    "prefill_packed",
]
