"""A decoder layer as two calls around its attention, of few rows or with linear layers that a pass computes.

Either way the residual stream is float32 (:mod:`.residual`), unless the pass computes the linear layers itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import LayerWeights, few_row_heads, few_row_mlp, rotate_rows_
from fused_kv_llm.model.attention import rule_of
from fused_kv_llm.model.decoder_stack import is_first_of_own, layers_alike
from fused_kv_llm.model.fast_forward import is_ours, own_parts
from fused_kv_llm.model.narrowing import narrow_rows
from fused_kv_llm.model.pass_context import LayerPass, Linears, required_pass
from fused_kv_llm.model.residual import ResidualStream

__all__ = ["attended", "decoder_layer", "heads_of"]


def decoder_layer(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer, unless it was computed already; the forward may be left before and behind it."""
    forward_pass = required_pass(LayerPass)
    pausing = forward_pass.pausing
    if forward_pass.next_layer > module.self_attn.layer_idx:
        # With the layers before it, or before the forward was left.
        return hidden_states if pausing is None or pausing.hidden is None else pausing.hidden
    if pausing is None:
        return _computed_layer(forward_pass, module, hidden_states, *args, **kwargs)
    pausing.enter()
    return pausing.leave(_computed_layer(forward_pass, module, hidden_states, *args, **kwargs))


def _computed_layer(forward_pass: LayerPass, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer in two calls around its attention, unless a part of it was wrapped, hooked or changed."""
    if args or hidden_states.dtype != torch.bfloat16:
        whole: Tensor = type(module).forward(module, hidden_states, *args, **kwargs)
        return whole
    parts, way, residual = own_parts(module), forward_pass.linears, forward_pass.residual
    if parts is not None and way is not None:
        given = _given_layer(way, module, parts, hidden_states, kwargs)
        if given is not None:
            residual.forget()
            return given
    if module.self_attn.layer_idx == 0:
        residual.is_private = is_first_of_own(module)
    if parts is not None and way is None:
        unchanged = residual.is_private and is_ours(module, narrow_rows)
        x = residual.of(hidden_states, unchanged=unchanged).float()
        x = _layer_in_two(forward_pass, module, parts, x, kwargs)
    else:
        x = _layer_by_parts(residual, module, hidden_states, kwargs)
    return residual.keep(x, hidden_states.dtype)


def _layer_in_two(
    forward_pass: LayerPass, module: Any, parts: LayerWeights, x: Tensor, kwargs: Mapping[str, Any]
) -> Tensor:
    attention, (cos, sin) = module.self_attn, kwargs["position_embeddings"]
    rule = rule_of(attention, kwargs["attention_mask"], attention.scaling, attention.head_dim)
    stack = layers_alike(module) if forward_pass.decodes else []
    if len(stack) > 1:
        return forward_pass.run_layers(x, stack, cos, sin, rule)
    q, k, v = few_row_heads(x, *parts.norm, parts.heads, cos, sin, attention.head_dim, parts.head_norms)
    k, v = kwargs["past_key_values"].update(k, v, attention.layer_idx)
    found = forward_pass.run_attention(attention.layer_idx, q, k, v, rule)
    return few_row_mlp(x, *parts.mlp_norm, *parts.mlp, (found.transpose(1, 2).flatten(2), parts.output))


def _layer_by_parts(residual: ResidualStream, module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Run a layer part by part, in transformers' order; what the parts give is added to the residual stream.

    What hooks of a norm change in place is changed in the residual stream, too, as it is in transformers.
    """
    attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **kwargs)
    after = residual.keep(residual.of(hidden).float() + attended, hidden.dtype)
    given: Tensor = module.mlp(module.post_attention_layernorm(after))
    return residual.of(after).float() + given


def _given_layer(way: Linears, module: Any, parts: LayerWeights, x: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Run a layer whose linear layers are computed in the model's place, with its norms and sums; None if none are."""
    attention = module.self_attn
    projected = way.normed((attention.q_proj, attention.k_proj, attention.v_proj), x, parts.norm)
    if projected is None:
        return None
    around = (kwargs[name] for name in ("position_embeddings", "attention_mask", "past_key_values"))
    found = attended(attention, heads_of(attention, projected), *around)
    ended = way.attended_mlp(module, x, found, parts.mlp_norm)
    if ended is None:
        x = x + attention.o_proj(found)
        ended = x + module.mlp(module.post_attention_layernorm(x))
    return ended


def heads_of(module: Any, projected: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return queries, keys and values ``[B, R, H, D]`` from what the linear layers gave."""
    q, k, v = (part.view(*part.shape[:-1], -1, module.head_dim) for part in projected)
    return (module.q_norm(q), module.k_norm(k), v) if hasattr(module, "q_norm") else (q, k, v)


def attended(
    module: Any,
    heads: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any,
) -> Tensor:
    """Return what attention gives, ``[B, R, Hq * D]``, from queries, keys and values ``[B, R, H, D]``."""
    q, k, v = (part.transpose(1, 2) for part in heads)
    q, k = (rotate_rows_(part, *position_embeddings) for part in (q, k))
    k, v = past_key_values.update(k, v, module.layer_idx)
    rule = rule_of(module, attention_mask, module.scaling, q.shape[-1])
    found = required_pass(LayerPass).run_attention(module.layer_idx, q, k, v, rule)
    return found.transpose(1, 2).flatten(2)
