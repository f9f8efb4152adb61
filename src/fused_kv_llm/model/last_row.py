"""The last layer for the last row only.

When a pass wants the next token's logits and nothing else, only the last row of the last layer is read. So the output
projection of attention and the MLP are computed for that row alone there. Their result is added to the residual of all
rows; what becomes of the others does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.model.pass_context import current_pass
from fused_kv_llm.model.seam import decoder_layers

__all__ = ["attach_last_row"]


def attach_last_row(model: Any) -> None:
    """Let a model's last layer compute its end for the last row only where a fused pass wants no more.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Attaching it again changes nothing.
    """
    layer = decoder_layers(model)[-1]
    attention = getattr(layer, "self_attn", None)
    ends = [getattr(attention, "o_proj", None), getattr(layer, "mlp", None)]
    modules = [module for module in ends if isinstance(module, torch.nn.Module)]
    # Layers that are built otherwise compute all rows, which takes longer and gives the same.
    for module in modules if len(modules) == len(ends) else ():
        if _last_row not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_last_row)


def _last_row(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.final_layer is None:
        return None
    return (inputs[0][:, -1:], *inputs[1:])
