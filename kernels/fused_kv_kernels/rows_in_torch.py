"""Row attention in plain torch, block by block: what CPUs without native operators run, and what those do not take."""

from __future__ import annotations

import torch
from torch import Tensor

from .row_plan import RowPlan
from .scoring import Scoring

__all__ = ["attend_in_torch"]


def attend_in_torch(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scoring: Scoring) -> Tensor:
    """Do what :func:`fused_kv_kernels.row_attention` does, on every device.

    In bfloat16, batched products are more than twice as fast as scaled_dot_product_attention; the scores are rounded to
    bfloat16 before the softmax, as in transformers' eager attention. In float32, scaled_dot_product_attention takes its
    wider tiles with 192 rows and more; it knows neither caps nor sinks.
    """
    if q.dtype in (torch.bfloat16, torch.float16) or not scoring.is_plain:
        return _folded_products(q, k, v, plan, scoring)
    if plan.is_dense:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=plan.num_rows > 1, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _folded_sdpa(q, k, v, plan, scoring.scale)


def _folded_sdpa(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float) -> Tensor:
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    queries = _fold(q, kv_heads)
    out = queries.new_empty(*queries.shape[:3], v.shape[3])
    most = max(block.stop - block.start for block in plan.blocks) * groups
    # One mask serves all blocks: what a block hides is shown again behind it.
    mask = plan.scratch(most * plan.num_keys, q.dtype)[: most * plan.num_keys].view(most, plan.num_keys).zero_()
    for block, biases in zip(plan.blocks, plan.biases(q.dtype, groups), strict=True):
        span, keys = slice(block.start * groups, block.stop * groups), slice(block.begin, block.end)
        rows = span.stop - span.start
        for stretch, bias in biases:
            mask[:rows, stretch] = bias
        out[:, :, span] = torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, span],
            k[:, :, keys],
            v[:, :, keys],
            attn_mask=mask[:rows, keys] if biases else None,
            scale=scale,
        )
        for stretch, _ in biases:
            mask[:rows, stretch] = 0.0
    return _unfold(out, groups)


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """Let the query heads that share a key head stand side by side as rows: ``[B, Hkv, R * G, D]``."""
    batch, q_heads, rows, dim = q.shape
    by_group = q.reshape(batch, kv_heads, q_heads // kv_heads, rows, dim)
    return by_group.transpose(2, 3).reshape(batch, kv_heads, -1, dim)


def _unfold(out: Tensor, groups: int) -> Tensor:
    """Return folded rows ``[B, Hq, R, D]``, laid out ``[B, R, Hq, D]`` in memory, as the output projection reads it."""
    batch, kv_heads, folded, dim = out.shape
    by_row = out.view(batch, kv_heads, folded // groups, groups, dim).permute(0, 2, 1, 3, 4)
    return by_row.reshape(batch, folded // groups, kv_heads * groups, dim).transpose(1, 2)


def _folded_products(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scoring: Scoring) -> Tensor:
    batch, q_heads, _, dim = q.shape
    kv_heads = k.shape[1]
    groups, heads = q_heads // kv_heads, batch * kv_heads
    queries = _fold(q * scoring.scale, kv_heads).reshape(heads, -1, dim)
    out = queries.new_empty(*queries.shape[:2], v.shape[3])
    # A contiguous [D, N] operand makes the score product 1.6x faster; the copy pays from two blocks on.
    keys_t = k.reshape(heads, -1, dim).transpose(1, 2) if batch > 1 else k[0].transpose(1, 2)
    keys_t = keys_t.contiguous() if len(plan.blocks) > 1 else keys_t
    values = v.reshape(heads, -1, v.shape[3]) if batch > 1 else v[0]
    largest = max((block.stop - block.start) * (block.end - block.begin) for block in plan.blocks)
    scratch = plan.scratch(batch * q_heads * largest, q.dtype)
    sinks = _folded_sinks(scoring.sinks, heads, groups)
    for block, biases in zip(plan.blocks, plan.biases(q.dtype, groups), strict=True):
        span, keys = slice(block.start * groups, block.stop * groups), slice(block.begin, block.end)
        shape = (heads, span.stop - span.start, block.end - block.begin)
        weights = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        scoring.capped_(torch.bmm(queries[:, span], keys_t[:, :, keys], out=weights))
        for stretch, bias in biases:
            weights[:, :, stretch.start - block.begin : stretch.stop - block.begin].add_(bias)
        if sinks is None:
            torch.softmax(weights, dim=-1, out=weights)
            out[:, span] = torch.bmm(weights, values[:, keys])
        else:
            share = scoring.kept_share(weights, sinks.repeat(1, block.stop - block.start, 1))
            torch.softmax(weights, dim=-1, out=weights)
            out[:, span] = torch.bmm(weights, values[:, keys]).mul_(share)
    return _unfold(out.view(batch, kv_heads, -1, v.shape[3]), groups)


def _folded_sinks(sinks: Tensor | None, heads: int, groups: int) -> Tensor | None:
    """Return the sinks of one folded position, float32 ``[heads, groups, 1]``, the heads those of the whole batch."""
    if sinks is None:
        return None
    by_head = sinks.float().view(-1, groups, 1)
    return by_head.repeat(heads // by_head.shape[0], 1, 1)
