"""The last layer for final rows only.

When a pass wants the next token's logits and nothing else, only the last row of the last layer is read, or the last row
of each request in it. So the output projection of attention and the MLP are computed for these rows alone there. What
they give the others does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.model.pass_context import current_pass
from fused_kv_llm.model.seam import decoder_layers

__all__ = ["attach_last_row"]


def attach_last_row(model: Any) -> None:
    """Let a model's last layer compute its end only for the rows whose logits a pass wants.

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
        if _final_rows not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_final_rows)
            module.register_forward_hook(_in_place)


def _final_rows(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.final_rows is None:
        return None
    return (inputs[0][:, forward_pass.final_rows], *inputs[1:])


def _in_place(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    """Give rows back their places among all rows of the pass, unless one row stands for all."""
    forward_pass = current_pass()
    if forward_pass is None or not isinstance(forward_pass.final_rows, Tensor):
        return None
    parts = output if isinstance(output, tuple) else (output,)
    whole = parts[0].new_zeros(parts[0].shape[0], forward_pass.num_rows, *parts[0].shape[2:])
    whole[:, forward_pass.final_rows] = parts[0]
    return (whole, *parts[1:]) if isinstance(output, tuple) else whole
