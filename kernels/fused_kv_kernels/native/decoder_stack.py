"""The native stack of decoder layers as a function of tensors. Callers check the shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, num_threads

if TYPE_CHECKING:
    from fused_kv_kernels.decode_attention import DecodeCaches
    from fused_kv_kernels.decoder_stack import LayerWeights

__all__ = ["native_decode_layers"]


def native_decode_layers(
    x: Tensor, layers: Sequence[LayerWeights], caches: DecodeCaches, first_layer: int, tables: tuple[Tensor, Tensor],
    first_keys: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Return :func:`fused_kv_kernels.decode_layers` of float32 ``[1, R, H]``."""
    _, rows, hidden = x.shape
    q_out, kv_out = (layers[0].heads[at][0].shape[0] for at in (0, 1))
    head_dim, width = caches.caches[0][0].shape[4], layers[0].mlp[0][0].shape[0]
    shape = kept_array((rows, hidden, q_out // head_dim, kv_out // head_dim, head_dim, width, tables[0].shape[2] // 2))
    library = loaded_library(tables[0].dtype)
    scratch = torch.empty(library.fkv_decode_layers_scratch(shape), dtype=torch.uint8)
    out = x.clone(memory_format=torch.contiguous_format)
    library.fkv_decode_layers(
        out.data_ptr(),
        int64_array(*(number for layer in layers for number in _addresses(layer))),
        (ctypes.c_float * (3 * len(layers)))(*(number for layer in layers for number in _epsilons(layer))),
        len(layers),
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        caches.entries,
        first_layer,
        None if first_keys is None else first_keys.data_ptr(),
        scratch.data_ptr(),
        caches.scratch(q_out // head_dim).data_ptr(),
        shape,
        scale,
        num_threads(),
    )
    return out


def _addresses(layer: LayerWeights) -> list[int]:
    """Return a layer's weights in the order in which native code has them."""
    norms = (None, None) if layer.head_norms is None else layer.head_norms[:2]
    heads = [one for pair in layer.heads for one in pair]
    tensors = (layer.norm[0], *heads, *norms, *layer.output, layer.mlp_norm[0], *(one for p in layer.mlp for one in p))
    return [0 if one is None else one.data_ptr() for one in tensors]


def _epsilons(layer: LayerWeights) -> tuple[float, float, float]:
    return layer.norm[1], 0.0 if layer.head_norms is None else layer.head_norms[2], layer.mlp_norm[1]
