"""Row attention: scattered query rows, each with its own causal limit, against a whole key/value sequence.

FusionRAG section 4.3 (Q-Sparse-Attn): the row positions are an input, no mask of size ``[R, N]`` is built,
and keys beyond a block's last row or before its first row's window are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_row_attention, row_attention_scratch, supports
from .row_plan import RowPlan
from .rows_in_torch import attend_in_torch
from .scoring import Scoring

__all__ = ["check_operands", "row_attention"]

# With fewer rows a key head, packing the keys of bfloat16 would cost more than the products, and registers of float32
# would be mostly empty.
_NATIVE_ROWS = {torch.bfloat16: 16, torch.float32: 4}
# As long as the packed keys stay in a core's second cache, what batched products cost by themselves is more.
_NATIVE_KEYS_NBYTES = {torch.bfloat16: 1 << 20}


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend scattered query rows to a whole key/value sequence, causal by true position.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    k, v : Tensor
        ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``; ``Hq`` is a multiple of ``Hkv``.
    plan : RowPlan
        The rows' positions and windows.
    scale : float
        Multiplies the scores.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the softmax's denominator, which has no value (gpt-oss).

    Returns
    -------
    Tensor
        ``[B, Hq, R, Dv]`` in the dtype of `q`.

    Raises
    ------
    ValueError
        If the shapes do not fit together or not the plan.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.

    Notes
    -----
    bfloat16 on a CPU with AVX512-BF16 and float32 on one with AVX2 go through native operators: one pass over the keys
    with a running softmax, measured twice and three times as fast as what other CPUs get, which folds the query heads
    of a group into the rows.
    """
    scoring = Scoring(scale, softcap, sinks)
    check_operands(q, k, v, plan)
    scoring.check(q.shape[1], q.device)
    if plan.num_rows == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    if use_triton("row attention", plan.q_positions, q=q, k=k, v=v):
        run = triton_op("row_attention", q.device)
        attended: Tensor = run(q, k, v, plan.q_positions, scoring, first_keys=plan.first_keys)[0]
        return attended
    if _is_for_native(q, k) and supports(q, k, v):
        scratch = plan.scratch(row_attention_scratch(q, k, v), torch.uint8)
        return native_row_attention(q, k, v, plan, scoring, scratch)
    return attend_in_torch(q, k, v, plan, scoring)


def check_operands(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan) -> None:
    """Refuse shapes that do not fit together or not the plan, with ValueError: operators read memory by them."""
    batch, q_heads, _, dim = q.shape
    fits = k.shape[:3] == v.shape[:3] and (k.shape[0], k.shape[3]) == (batch, dim)
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


def _is_for_native(q: Tensor, k: Tensor) -> bool:
    """Return whether native operators are the faster ones, where there are any."""
    rows_of_a_head = q.shape[2] * (q.shape[1] // k.shape[1])
    return rows_of_a_head >= _NATIVE_ROWS.get(q.dtype, 0) or k.nbytes <= _NATIVE_KEYS_NBYTES.get(q.dtype, 0)
