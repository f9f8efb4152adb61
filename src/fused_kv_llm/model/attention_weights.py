"""Attention weights as a matrix, for the methods that look at them."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan
from fused_kv_llm.model.attention_rule import AttentionRule

__all__ = ["attention_weights"]


def attention_weights(q: Tensor, k: Tensor, plan: RowPlan, rule: AttentionRule, span: slice) -> Tensor:
    """Return the softmax weights of some rows.

    Parameters
    ----------
    q : Tensor
        ``[Hq, R, D]``: queries of the rows in `span`.
    k : Tensor
        ``[Hkv, N, D]``.
    plan : RowPlan
        What each row sees.
    rule : AttentionRule
    span : slice
        Which of the plan's rows.

    Returns
    -------
    Tensor
        float32 ``[Hq, R, N]``.
    """
    wide = k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2)
    scores = ((q * rule.scale) @ wide).float()
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    places = torch.arange(k.shape[1], device=k.device)
    hidden = places[None, :] > plan.q_positions[span, None]
    if plan.first_keys is not None:
        hidden |= places[None, :] < plan.first_keys[span, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is None:
        return scores.softmax(-1)
    sinks = rule.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
