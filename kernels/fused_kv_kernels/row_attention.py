"""Row attention: scattered query rows, each with its own causal limit, against a whole key/value sequence.

FusionRAG section 4.3 (Q-Sparse-Attn): the row positions are an input, no mask of size ``[R, N]`` is built,
and keys beyond a block's last row are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_row_attention, row_attention_scratch, supports

__all__ = ["RowPlan", "row_attention"]

BLOCK_ROWS = 64
# With fewer rows a key head, packing the keys of bfloat16 would cost more than the products, and registers of float32
# would be mostly empty.
_NATIVE_ROWS = {torch.bfloat16: 16, torch.float32: 4}
# As long as the packed keys stay in a core's second cache, what batched products cost by themselves is more.
_NATIVE_KEYS_NBYTES = {torch.bfloat16: 1 << 20}


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows ``[start, stop)`` see all keys before `diagonal` and some of those in ``[diagonal, end)``."""

    start: int
    stop: int
    diagonal: int
    end: int


class RowPlan:
    """Blocks of query rows, shared by all layers of one forward pass.

    Parameters
    ----------
    q_positions : Tensor
        int64 ``[R]``, strictly ascending, each in ``[0, num_keys)``.
    num_keys : int
        Keys ``N`` the rows may see.
    block_rows : int
        Rows per block. Fewer rows make the products thin, more rows read more keys that the mask then hides;
        64 to 128 measured alike on CPUs.

    Raises
    ------
    ValueError
        If the positions are not strictly ascending or lie outside the keys.
    """

    def __init__(self, q_positions: Tensor, num_keys: int, block_rows: int = BLOCK_ROWS) -> None:
        # Kernels step through them one by one.
        self.q_positions = q_positions.contiguous()
        self.num_keys = num_keys
        positions = q_positions.tolist()
        if positions and (positions[0] < 0 or positions[-1] >= num_keys):
            msg = f"query positions {positions[0]}..{positions[-1]} lie outside the {num_keys} keys"
            raise ValueError(msg)
        if any(a >= b for a, b in pairwise(positions)):
            msg = "query positions must be strictly ascending: sort them and drop duplicates"
            raise ValueError(msg)
        self.blocks: list[_Block] = []
        for start in range(0, len(positions), block_rows):
            stop = min(start + block_rows, len(positions))
            self.blocks.append(_Block(start, stop, positions[start] + 1, positions[stop - 1] + 1))
        self._biases: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return int(self.q_positions.shape[0])

    def biases(self, dtype: torch.dtype, repeat: int = 1) -> list[Tensor]:
        """Return, for each block, what its scores against keys ``[diagonal, end)`` get added.

        Zero where the row may see the key, minus infinity where it may not. Adding measured twenty times
        faster on CPUs than filling a strided view through a boolean mask.

        Parameters
        ----------
        dtype : torch.dtype
        repeat : int
            Times that each row stands in the scores, one after another.

        Returns
        -------
        list of Tensor
            ``[(stop - start) * repeat, end - diagonal]`` each; made once.
        """
        if (dtype, repeat) not in self._biases:
            device = self.q_positions.device
            columns = torch.arange(self.num_keys, device=device)
            self._biases[dtype, repeat] = []
            for block in self.blocks:
                rows = self.q_positions[block.start : block.stop].repeat_interleave(repeat)
                bias = torch.zeros(rows.shape[0], block.end - block.diagonal, dtype=dtype, device=device)
                bias.masked_fill_(columns[block.diagonal : block.end] > rows[:, None], float("-inf"))
                self._biases[dtype, repeat].append(bias)
        return self._biases[dtype, repeat]

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return working memory of at least `numel` elements, kept for the next layer.

        Fresh memory has to be mapped page by page, which for score blocks costs as much as filling them.
        A plan therefore belongs to one forward pass at a time.
        """
        kept = self._scratch.get(dtype)
        if kept is None or kept.numel() < numel:
            kept = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=self.q_positions.device)
        return kept

    @property
    def is_dense(self) -> bool:
        """Whether the rows are all the keys, so that plain causal attention is the same."""
        return self.num_rows == self.num_keys


def row_attention(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float) -> Tensor:
    """Attend scattered query rows to a whole key/value sequence, causal by true position.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    k, v : Tensor
        ``[B, Hkv, N, D]``; ``Hq`` is a multiple of ``Hkv``.
    plan : RowPlan
        The rows' positions.
    scale : float
        Multiplies the scores.

    Returns
    -------
    Tensor
        ``[B, Hq, R, D]`` in the dtype of `q`.

    Raises
    ------
    ValueError
        If the shapes do not fit together or not the plan.

    Notes
    -----
    bfloat16 on a CPU with AVX512-BF16 and float32 on one with AVX2 go through native operators: one pass over the keys
    with a running softmax, measured twice and three times as fast as what other CPUs get. That folds the query heads
    of a group into the rows; in bfloat16 it makes batched products, more than twice as fast there as
    scaled_dot_product_attention, and rounds the scores to bfloat16 before the softmax, as transformers' eager attention
    does; in float32 it uses scaled_dot_product_attention block by block: with 192 rows and more that takes its wider
    tiles.
    """
    # What runs below reads memory by these shapes.
    batch, q_heads, _, dim = q.shape
    fits = k.shape == v.shape and (k.shape[0], k.shape[3]) == (batch, dim)
    fits = fits and k.shape[1] > 0 and q_heads % k.shape[1] == 0
    if not fits:
        msg = f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together"
        raise ValueError(msg)
    if q.shape[2] != plan.num_rows or k.shape[2] != plan.num_keys:
        msg = (
            f"q has {q.shape[2]} rows and k {k.shape[2]} keys, but the plan was made for "
            f"{plan.num_rows} rows and {plan.num_keys} keys"
        )
        raise ValueError(msg)
    if plan.num_rows == 0:
        return torch.empty_like(q)
    if use_triton("row attention", plan.q_positions, q=q, k=k, v=v):
        return triton_op("row_attention", q.device)(q, k, v, plan.q_positions, scale)[0]  # type: ignore[no-any-return]
    if _is_for_native(q, k) and supports(q, k, v):
        scratch = plan.scratch(row_attention_scratch(q, k), torch.uint8)
        return native_row_attention(q, k, v, plan.q_positions, scale, scratch)
    if q.dtype in (torch.bfloat16, torch.float16):
        return _folded_products(q, k, v, plan, scale)
    if plan.is_dense:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=plan.num_rows > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return _folded_sdpa(q, k, v, plan, scale)


def _is_for_native(q: Tensor, k: Tensor) -> bool:
    """Return whether native operators are the faster ones, where there are any."""
    rows_of_a_head = q.shape[2] * (q.shape[1] // k.shape[1])
    return rows_of_a_head >= _NATIVE_ROWS.get(q.dtype, 0) or k.nbytes <= _NATIVE_KEYS_NBYTES.get(q.dtype, 0)


def _folded_sdpa(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float) -> Tensor:
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    queries = _fold(q, kv_heads)
    out = torch.empty_like(queries)
    most = max(block.stop - block.start for block in plan.blocks) * groups
    # One mask serves all blocks: each hides keys behind its diagonal only, and the next one's begins where it ends.
    mask = plan.scratch(most * plan.num_keys, q.dtype)[: most * plan.num_keys].view(most, plan.num_keys).zero_()
    for block, bias in zip(plan.blocks, plan.biases(q.dtype, groups), strict=True):
        span, rows = slice(block.start * groups, block.stop * groups), bias.shape[0]
        mask[:rows, block.diagonal : block.end] = bias
        out[:, :, span] = torch.nn.functional.scaled_dot_product_attention(
            queries[:, :, span],
            k[:, :, : block.end],
            v[:, :, : block.end],
            attn_mask=mask[:rows, : block.end] if bias.shape[1] else None,
            scale=scale,
        )
        mask[:rows, block.diagonal : block.end] = 0.0
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


def _folded_products(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float) -> Tensor:
    batch, q_heads, _, dim = q.shape
    kv_heads = k.shape[1]
    groups, heads = q_heads // kv_heads, batch * kv_heads
    queries = _fold(q * scale, kv_heads).reshape(heads, -1, dim)
    out = torch.empty_like(queries)
    # A contiguous [D, N] operand makes the score product 1.6x faster; the copy pays from two blocks on.
    keys_t = k.reshape(heads, -1, dim).transpose(1, 2) if batch > 1 else k[0].transpose(1, 2)
    keys_t = keys_t.contiguous() if len(plan.blocks) > 1 else keys_t
    values = v.reshape(heads, -1, dim) if batch > 1 else v[0]
    largest = max((block.stop - block.start) * block.end for block in plan.blocks)
    scratch = plan.scratch(batch * q_heads * largest, q.dtype)
    for block, bias in zip(plan.blocks, plan.biases(q.dtype, groups), strict=True):
        span = slice(block.start * groups, block.stop * groups)
        shape = (heads, span.stop - span.start, block.end)
        weights = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(queries[:, span], keys_t[:, :, : block.end], out=weights)
        weights[:, :, block.diagonal :].add_(bias)
        torch.softmax(weights, dim=-1, out=weights)
        out[:, span] = torch.bmm(weights, values[:, : block.end])
    return _unfold(out.view(batch, kv_heads, -1, dim), groups)
