"""KV deviation in Triton: fresh and stored KV are read once, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import block_dim

__all__ = ["kv_deviation"]

_BLOCK_T = 16


@triton.jit(do_not_specialize=["tokens"])
def _deviation_kernel(
    fresh_k, fresh_v, stored_k, stored_v, fresh_rows, stored_rows, out,
    stride_fkh, stride_fkt, stride_fvh, stride_fvt, stride_skh, stride_skt, stride_svh, stride_svt,
    tokens, key_heads, value_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum the squared gaps of one block of tokens over all heads."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    is_token = token < tokens
    value_dims = tl.arange(0, BLOCK_DV)
    fresh = tl.load(fresh_rows + token, mask=is_token, other=0).to(tl.int64)[:, None]
    stored = tl.load(stored_rows + token, mask=is_token, other=0).to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for head in range(0, tl.maximum(key_heads, value_heads)):
        of_keys = is_token[:, None] & (dims < tl.where(head < key_heads, D, 0))[None, :]
        of_values = is_token[:, None] & (value_dims < tl.where(head < value_heads, DV, 0))[None, :]
        new_k = tl.load(fresh_k + fresh * stride_fkt + dims[None, :], mask=of_keys, other=0.0)
        old_k = tl.load(stored_k + stored * stride_skt + dims[None, :], mask=of_keys, other=0.0)
        new_v = tl.load(fresh_v + fresh * stride_fvt + value_dims[None, :], mask=of_values, other=0.0)
        old_v = tl.load(stored_v + stored * stride_svt + value_dims[None, :], mask=of_values, other=0.0)
        gap_k = new_k.to(tl.float32) - old_k.to(tl.float32)
        gap_v = new_v.to(tl.float32) - old_v.to(tl.float32)
        total += tl.sum(gap_k * gap_k, 1) + tl.sum(gap_v * gap_v, 1)
        # Stepping on, rather than multiplying: many heads of a long cache are more than 32 bits apart.
        fresh_k += stride_fkh
        fresh_v += stride_fvh
        stored_k += stride_skh
        stored_v += stride_svh
    tl.store(out + token, tl.sqrt(total), mask=is_token)


def kv_deviation(
    fresh_keys: Tensor,
    fresh_values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    fresh_rows: Tensor,
    stored_rows: Tensor,
) -> Tensor:
    """Return how far tokens' fresh KV is from the stored one; see :func:`fused_kv_kernels.kv_deviation`."""
    (key_heads, _, dim), (value_heads, _, value_dim) = fresh_keys.shape, fresh_values.shape
    tokens = fresh_rows.shape[0]
    out = torch.empty(tokens, dtype=torch.float32, device=fresh_keys.device)
    if tokens:
        rows = (fresh_rows.contiguous(), stored_rows.contiguous())
        tensors = (fresh_keys, fresh_values, stored_keys, stored_values)
        _deviation_kernel[(triton.cdiv(tokens, _BLOCK_T),)](
            *tensors, *rows, out, *(stride for x in tensors for stride in x.stride()[:2]),
            tokens, key_heads, value_heads, D=dim, BLOCK_D=block_dim(dim), DV=value_dim, BLOCK_DV=block_dim(value_dim),
            BLOCK_T=_BLOCK_T, num_warps=4,
        )  # fmt: skip
    return out
