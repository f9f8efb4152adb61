"""Norms, attention and MLPs of a decoder on the CPU, through operators that pass over the memory once.

The modules keep their weights and their class. Without gradients, in bfloat16 and where the native operators are
available, their forward takes another way to the same numbers; that of attention only in a fused pass.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import gated_silu, rms_norm, rotate_rows_, why_not_native

__all__ = ["attach_cpu_layers"]

_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
_ATTENTION = frozenset({"LlamaAttention", "MistralAttention", "Phi3Attention", "Qwen2Attention", "Qwen3Attention"})
_GATED_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
_PACKED_MLPS = frozenset({"Phi3MLP"})


def attach_cpu_layers(model: Any) -> None:
    """Let a model's norms, attention and MLPs take the fast way where there is one.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of a verified architecture; modules of other classes stay as they are.
    """
    if why_not_native() is not None:
        return
    for module in model.modules():
        forward = _fast_forward(module)
        if forward is not None:
            module.forward = types.MethodType(forward, module)


def _fast_forward(module: Any) -> Any | None:
    name = type(module).__name__
    if name in _NORMS:
        return _norm
    if name in _ATTENTION:
        return _attention
    if not isinstance(getattr(module, "act_fn", getattr(module, "activation_fn", None)), _silu_types()):
        return None
    if name in _GATED_MLPS:
        return _gated_mlp
    return _packed_mlp if name in _PACKED_MLPS else None


def _silu_types() -> tuple[type, ...]:
    from transformers.activations import ACT2FN

    return torch.nn.SiLU, type(ACT2FN["silu"])


def _is_fast(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.is_grad_enabled()


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if not _is_fast(hidden_states):
        return _own(module, hidden_states)
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _attention(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    fused_pass, cache = kwargs.get("fused_pass"), kwargs.get("past_key_values")
    if fused_pass is None or cache is None or args or not _is_fast(hidden_states):
        result: tuple[Tensor, Tensor | None] = type(module).forward(module, hidden_states, *args, **kwargs)
        return result
    q, k, v = (part.transpose(1, 2) for part in _projected(module, hidden_states))
    cos, sin = kwargs["position_embeddings"]
    k, v = cache.update(rotate_rows_(k, cos, sin), v, module.layer_idx)
    attended = fused_pass.attend(module.layer_idx, rotate_rows_(q, cos, sin), k, v, float(module.scaling))
    return module.o_proj(attended.transpose(1, 2).flatten(2)), None


def _projected(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values ``[B, R, H, D]``."""
    packed = getattr(module, "qkv_proj", None)
    if packed is not None:
        heads, kv_heads = module.config.num_attention_heads, module.num_key_value_heads
        parts = packed(x).unflatten(-1, (-1, module.head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        return tuple(parts)
    q, k, v = (
        project(x).unflatten(-1, (-1, module.head_dim)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    return q, k, v


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    if not _is_fast(x):
        return _own(module, x)
    down: Tensor = module.down_proj(gated_silu(module.gate_proj(x), module.up_proj(x)))
    return down


def _packed_mlp(module: Any, hidden_states: Tensor) -> Tensor:
    if not _is_fast(hidden_states):
        return _own(module, hidden_states)
    gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    down: Tensor = module.down_proj(gated_silu(gate, up))
    return down


def _own(module: Any, x: Tensor) -> Tensor:
    result: Tensor = type(module).forward(module, x)
    return result
