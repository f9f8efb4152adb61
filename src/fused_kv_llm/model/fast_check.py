"""Fast layers are used only where they have been seen to compute what a model's own do."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.cpu_layers import attach_cpu_layers, detach_cpu_layers
from fused_kv_llm.model.deviation import by_layer, worst
from fused_kv_llm.model.forward_pass import ForwardPass
from fused_kv_llm.model.geometry import Geometry
from fused_kv_llm.model.seam import run_model

__all__ = ["attach_checked"]

_ROWS = 8


def attach_checked(model: Any, geometry: Geometry, model_id: str) -> None:
    """Give a model its fast layers, unless a short forward with them is another one than without.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On the CPU, its attention behind the seam.
    geometry : Geometry
    model_id : str
        Its name, for the warning.
    """
    attached = attach_cpu_layers(model)
    if not attached:
        return
    fast = _computed(model, geometry)
    detach_cpu_layers(attached)
    own = _computed(model, geometry)
    layers = [number // 2 for number in range(len(own))]
    found = worst(by_layer(zip(fast, own, strict=True)), model.dtype, layers=layers)
    if found is None:
        attach_cpu_layers(model)
        return
    warnings.warn(
        f"The fast layers for this processor do not compute what the layers of {model_id!r} do (layer {found.layer} is "
        f"off by {found.deviation:.1%}, rounding explains {found.tolerated:.1%}). They are not used, and answers come "
        "later. Something that its layers call may have been patched.",
        FusedKVWarning,
        stacklevel=4,
    )


def _computed(model: Any, geometry: Geometry) -> list[Tensor]:
    """Return keys and values ``[Hkv, n, D]`` of every layer in turn, and logits ``[1, n, vocabulary]``, of a pass."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = torch.arange(_ROWS)
    cache = FusedCache(geometry, _ROWS, CachePool(model.dtype, model.device))
    with torch.inference_mode():
        logits = run_model(model, (rows * 4099 % vocabulary)[None], rows, cache, ForwardPass(rows, _ROWS))
    parts = [part[0].clone() for layer in cache.layers for part in (layer.keys, layer.values)]
    return [*parts, logits]
