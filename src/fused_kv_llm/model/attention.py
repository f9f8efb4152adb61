"""The attention seam: one attention function and one mask function, registered under one name.

A fused forward passes its state as the keyword argument ``fused_pass``, which transformers hands through to
the attention function. A forward without it, for instance a user's own ``model.generate``, takes
transformers' SDPA path unchanged, mask included.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["ATTENTION_NAME", "AttentionPass", "attach_attention", "no_mask"]

ATTENTION_NAME = "fused_kv"


class AttentionPass(Protocol):
    """State of one forward pass: which rows it computes and what attention does for them."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[B, Hq, R, D]`` of queries ``[B, Hq, R, D]``."""


def _fused_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    fused_pass: AttentionPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if fused_pass is None:
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, weights
    scale = kwargs.get("scaling")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    attended = fused_pass.attend(module.layer_idx, query, key, value, scale)
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
