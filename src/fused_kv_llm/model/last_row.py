"""The last layer for the last row only.

When a pass wants the next token's logits and nothing else, only the last row of the last layer is read. So the output
projection of attention and the MLP are computed for that row alone there. Their result is added to the residual of all
rows; what becomes of the others does not matter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_kv_llm.model.pass_context import current_pass

__all__ = ["attach_last_row"]


def attach_last_row(model: Any) -> None:
    """Let a model's last layer compute its end for the last row only where a fused pass wants no more.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of a verified architecture. Attaching it again changes nothing.
    """
    layer = model.get_decoder().layers[-1]
    for module in (layer.self_attn.o_proj, layer.mlp):
        if _last_row not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_last_row)


def _last_row(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.final_layer is None:
        return None
    return (inputs[0][:, -1:], *inputs[1:])
