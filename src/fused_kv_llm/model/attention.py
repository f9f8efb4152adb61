"""The attention seam: one attention function and one mask function, registered under one name.

Attention asks the pass that is being run (:mod:`.pass_context`). A forward outside of one, for instance a user's own
``model.generate``, takes transformers' SDPA path unchanged, mask included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fused_kv_llm.model.pass_context import current_pass

__all__ = ["ATTENTION_NAME", "attach_attention", "no_mask"]

ATTENTION_NAME = "fused_kv"


def _fused_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    forward_pass = current_pass()
    if forward_pass is None:
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, weights
    scale = kwargs.get("scaling")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    attended = forward_pass.attend(module.layer_idx, query, key, value, scale)
    return attended.transpose(1, 2).contiguous(), None


def no_mask(device: torch.device) -> Tensor:
    """Return the placeholder that keeps transformers from building a mask for a fused pass.

    A four-dimensional mask is taken as already prepared and reaches the attention function as it is.
    """
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)


def attach_attention(model: Any) -> None:
    """Let a model's attention go through the seam.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its attention implementation is set; nothing else about it changes.
    """
    AttentionInterface.register(ATTENTION_NAME, _fused_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)
