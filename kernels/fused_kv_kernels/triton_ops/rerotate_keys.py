"""Key re-rotation in Triton: keys are read once, in their own dtype, and written once, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_rows import pair_columns, turn

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable

__all__ = ["rerotate_keys"]

_BLOCK_T = 32


@triton.jit(do_not_specialize=["tokens"])
def _rerotate_kernel(
    keys, cos, sin, out, stride_h, stride_t, stride_angle, tokens,
    INTERLEAVED: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Rotate one block of one head's keys."""
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    is_token = token < tokens
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = is_token & (pairs < HALF)
    x_at, y_at = pair_columns(pairs, HALF, INTERLEAVED)
    from_row = keys + head * stride_h + token * stride_t
    to_row = out + (head * tokens + token) * D
    x = tl.load(from_row + x_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(from_row + y_at, mask=inside, other=0.0).to(tl.float32)
    turn_x = tl.load(cos + token * stride_angle + pairs, mask=inside, other=1.0)
    turn_y = tl.load(sin + token * stride_angle + pairs, mask=inside, other=0.0)
    x, y = turn(x, y, turn_x, turn_y)
    tl.store(to_row + x_at, x, mask=inside)
    tl.store(to_row + y_at, y, mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        kept = tl.load(from_row + rest, mask=is_token & (rest < D), other=0.0)
        tl.store(to_row + rest, kept.to(tl.float32), mask=is_token & (rest < D))


def rerotate_keys(keys: Tensor, table: RotationTable) -> Tensor:
    """Rotate keys by the angles of a table; see :func:`fused_kv_kernels.rerotate_keys`."""
    tokens, dim = keys.shape[-2:]
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    if out.numel() == 0:
        return out
    by_head = keys.reshape(-1, tokens, dim)
    half = table.half
    rest = dim - 2 * half
    _rerotate_kernel[(triton.cdiv(tokens, _BLOCK_T), by_head.shape[0])](
        by_head, table.cos, table.sin, out, *by_head.stride()[:2], 0 if len(table) == 1 else half, tokens,
        INTERLEAVED=table.interleaved, D=dim, HALF=half, BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        REST=rest, BLOCK_REST=triton.next_power_of_2(max(rest, 1)), BLOCK_T=_BLOCK_T, num_warps=4,
    )  # fmt: skip
    return out
