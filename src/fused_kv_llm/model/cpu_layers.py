"""Norms, attention, MLPs and linear layers of a decoder on the CPU, through operators that read memory once.

The modules keep their weights and their class. In a pass of the engine, in bfloat16 or float32, their forward computes
the same numbers with native operators where those are available. Linear layers do so too: in bfloat16 with few rows
(a skinny GEMM), in float32 always, where torch's own product is slower. A pass can override how they are computed
(``LayerPass.linears``). In bfloat16, decoder layers and the head round less often than transformers' own do: the
residual stream (:mod:`.residual`) and logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import (
    few_row_linears,
    float_linear,
    gated_silu,
    has_eight_bit_linears,
    residual_norm,
    rms_norm,
    why_not_native,
)
from fused_kv_llm.model.cpu_linear import linear_in_onednn, onednn_is_faster
from fused_kv_llm.model.decoder_layer import attended, decoder_layer, heads_of
from fused_kv_llm.model.decoder_stack import note_first_layer
from fused_kv_llm.model.fast_forward import FastForward, has_known_gate, is_plain
from fused_kv_llm.model.own_code import is_library_class, patches
from fused_kv_llm.model.pass_context import LayerPass, required_pass

__all__ = ["attach_cpu_layers", "detach_cpu_layers"]


def attach_cpu_layers(model: Any) -> list[Any]:
    """Give a model's norms, attention, MLPs and linear layers fast forwards where there are any.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of a verified architecture. Modules of other classes, also of classes with the same name, and those whose
        forward somebody has replaced, in the module or in its class, stay as they are. Attaching it again changes
        nothing.

    Returns
    -------
    list of torch.nn.Module
        The modules that have got one now; see :func:`detach_cpu_layers`.
    """
    native = why_not_native(model.dtype) is None
    in_bfloat16 = model.dtype == torch.bfloat16
    in_float32 = model.dtype == torch.float32
    linear = native if in_bfloat16 else in_float32 and (onednn_is_faster() or (native and has_eight_bit_linears()))
    linear = linear and not patches([torch.nn.Linear])
    head = (model.get_output_embeddings(),) if in_bfloat16 else ()
    modules = [module for module in (*model.get_decoder().modules(), *head) if "forward" not in vars(module)]
    ways = _ways_of(set(map(type, modules)), model.dtype)
    attached = []
    for module in modules:
        if type(module) is torch.nn.Linear:
            way = (_logits if module in head else _linear) if linear else None
        else:
            way = ways.get(type(module)) if native else None
        if way is not None and has_known_gate(module):
            module.forward = FastForward(module, way)
            attached.append(module)
    note_first_layer(model.get_decoder(), decoder_layer)
    return attached


def detach_cpu_layers(modules: Iterable[Any]) -> None:
    """Take the fast forwards of modules away again."""
    for module in modules:
        if isinstance(vars(module).get("forward"), FastForward):
            del module.forward


def _ways_of(kinds: set[type], dtype: torch.dtype) -> dict[type, Callable[..., Any]]:
    """Return the fast forwards of classes: transformers' very own, with nothing patched in them or beside them."""
    known = {kind: way for kind in kinds if (way := _WAYS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None}
    return {
        kind: way
        for kind, way in known.items()
        if is_library_class(kind) and not patches([kind]) and (way is not decoder_layer or dtype == torch.bfloat16)
    }


def _linear(module: Any, x: Tensor) -> Tensor:
    way = required_pass(LayerPass).linears
    given = way([module], x) if way is not None and is_plain(module) else None
    return _computed_linear(module, x) if given is None else given[0]


def _linears(modules: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Call several linear layers with one input: together, unless one was wrapped, hooked or changed."""
    way = required_pass(LayerPass).linears
    if (way is None and x.dtype != torch.bfloat16) or not all(map(is_plain, modules)):
        return [module(x) for module in modules]
    given = None if way is None else way(modules, x)
    if given is not None:
        return given
    if x.dtype == torch.bfloat16:
        return few_row_linears(x, [(module.weight, module.bias) for module in modules])
    return [_computed_linear(module, x) for module in modules]


def _computed_linear(module: Any, x: Tensor) -> Tensor:
    # Weights that were moved, converted or quantised after loading are torch's to multiply.
    weight, bias = module.weight, module.bias
    if type(weight) is torch.nn.Parameter and weight.dtype == x.dtype and x.device.type == "cpu":
        if x.dtype == torch.bfloat16:
            return few_row_linears(x, [(weight, bias)])[0]
        if x.dtype == torch.float32 and onednn_is_faster():
            return linear_in_onednn(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def _logits(module: Any, x: Tensor) -> Tensor:
    # What somebody has put behind the head, or hooks of it, expect the model's dtype.
    is_last = required_pass(LayerPass).head is module and is_plain(module)
    if is_last and module.weight.dtype == x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return float_linear(x, (module.weight, module.bias))
    return _computed_linear(module, x)


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    exact = required_pass(LayerPass).residual.of(hidden_states)
    norm = rms_norm if exact is hidden_states else residual_norm
    return norm(exact, module.weight, module.variance_epsilon)


def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    packed = getattr(module, "qkv_proj", None)
    if packed is not None:
        heads, kv_heads = module.config.num_attention_heads, module.num_key_value_heads
        parts = packed(hidden_states).unflatten(-1, (-1, module.head_dim)).split((heads, kv_heads, kv_heads), dim=2)
    else:
        parts = heads_of(module, _linears((module.q_proj, module.k_proj, module.v_proj), hidden_states))
    return module.o_proj(attended(module, parts, position_embeddings, attention_mask, past_key_values)), None


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    if not has_known_gate(module):
        own: Tensor = type(module).forward(module, x)
        return own
    gate, up, last = module.gate_proj, module.up_proj, module.down_proj
    way = required_pass(LayerPass).linears
    whole = way.gated_mlp(gate, last, x) if way is not None and all(map(is_plain, (gate, up, last))) else None
    if whole is not None:
        return whole
    down: Tensor = last(gated_silu(*_linears((gate, up), x)))
    return down


def _packed_mlp(module: Any, hidden_states: Tensor) -> Tensor:
    if not has_known_gate(module):
        own: Tensor = type(module).forward(module, hidden_states)
        return own
    down: Tensor = module.down_proj(gated_silu(*module.gate_up_proj(hidden_states).chunk(2, dim=-1)))
    return down


def _ways() -> Iterator[tuple[str, Callable[..., Any]]]:
    for family in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"):
        module = f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}"
        yield f"{module}RMSNorm", _norm
        yield f"{module}Attention", _attention
        yield f"{module}MLP", _packed_mlp if family == "Phi3" else _gated_mlp
        if family != "Phi3":
            # In bfloat16 only: few rows are no faster in float32.
            yield f"{module}DecoderLayer", decoder_layer


_WAYS = dict(_ways())
