"""Decoder layers that a step may compute together, since they are alike and nobody looks between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fused_kv_kernels import LayerWeights
from fused_kv_llm.model.fast_forward import FastForward, is_ours, own_parts
from fused_kv_llm.model.narrowing import narrow_rows
from fused_kv_llm.model.own_code import is_library_class, patches

__all__ = ["is_first_of_own", "layers_alike", "may_pause", "note_first_layer"]


def note_first_layer(decoder: Any, way: Callable[..., Any]) -> None:
    """Let the first layer of a decoder know the others, if all have the same fast forward and nobody patched the loop.

    Parameters
    ----------
    decoder : torch.nn.Module
    way : callable
        The fast forward of decoder layers.
    """
    layers = list(getattr(decoder, "layers", ()))
    forwards = [vars(layer).get("forward") for layer in layers]
    kind = type(decoder)
    if (
        layers
        and all(type(forward) is FastForward and forward.way is way for forward in forwards)
        and is_library_class(kind)
        and not patches([kind])
    ):
        forwards[0].decoder, forwards[0].loop = decoder, kind.forward


def layers_alike(layer: Any) -> list[LayerWeights]:
    """Return the weights of a decoder's first layers that may be computed together; none unless `layer` is the first.

    They end before a layer that somebody has wrapped, hooked or changed, in itself or in a part of it, or that attends
    otherwise than the first.
    """
    decoder = _decoder_of(layer)
    if decoder is None or not _has_own_loop(decoder, layer):
        return []
    # The lists are read anew: their owner may have taken layers away.
    layers = list(decoder.layers)[: decoder.config.num_hidden_layers]
    if layers[:1] != [layer]:
        return []
    kinds = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
    first, found = _way(layer), []
    for index, (one, kind) in enumerate(zip(layers, kinds, strict=False)):
        alike = kind == kinds[0] and _way(one) == first and one.self_attn.layer_idx == index
        weights = own_parts(one) if alike and is_ours(one, narrow_rows) else None
        if weights is None:
            break
        found.append(weights)
    return found


def may_pause(decoder: Any) -> bool:
    """Return whether nobody stands between any two layers of a decoder, so that a forward may be left there.

    Nobody may look at a whole layer, which is called again without computing when the forward goes on. Hooks of its
    parts are called once.

    Parameters
    ----------
    decoder : torch.nn.Module
    """
    layers = list(getattr(decoder, "layers", ()))
    if not layers or _decoder_of(layers[0]) is not decoder:
        return False
    return _has_own_loop(decoder, layers[0]) and all(is_ours(layer, narrow_rows) for layer in layers)


def is_first_of_own(layer: Any) -> bool:
    """Return whether a layer is the first of a decoder between whose layers nobody stands, see :func:`may_pause`."""
    decoder = _decoder_of(layer)
    return decoder is not None and may_pause(decoder)


def _has_own_loop(decoder: Any, first: Any) -> bool:
    """Return whether nobody has patched how a decoder calls its layers since the first of them got to know it."""
    return "forward" not in vars(decoder) and type(decoder).forward is vars(first)["forward"].loop


def _decoder_of(layer: Any) -> Any:
    """Return the decoder whose first layer it is, or None."""
    return getattr(vars(layer).get("forward"), "decoder", None)


def _way(layer: Any) -> tuple[Any, ...]:
    """Return how a layer attends, beside the mask and the rotation that all layers of its kind are given."""
    attention = layer.self_attn
    return type(layer), getattr(attention, "is_causal", True), attention.scaling, attention.head_dim
