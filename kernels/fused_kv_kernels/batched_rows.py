"""Row attention over a batch: each sequence has its own rows, lengths and key positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .reference import batched_row_attention_reference
from .scoring import Scoring

__all__ = ["batched_row_attention"]


def batched_row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    kv_positions: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend scattered query rows to whole key/value sequences, causal by true position.

    FusionRAG section 4.3 (Q-Sparse-Attn). Row ``i`` of a sequence sees the keys at positions up to
    ``q_positions[i]``. In Triton, keys beyond the largest position of a block of rows are never read.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    k, v : Tensor
        ``[B, Hkv, N, D]``; ``Hq`` is a multiple of ``Hkv``.
    q_positions : Tensor
        int64 ``[R]`` or ``[B, R]``, strictly ascending, not negative.
    scale : float
        Multiplies the scores; positive.
    kv_positions : Tensor, optional
        int64 ``[N]`` or ``[B, N]``, in any order: where each key stands. Key ``j`` stands at ``j`` without it. In
        Triton, a key at ``2^31 - 1`` or beyond is hidden from all rows.
    q_lengths, kv_lengths : Tensor, optional
        int64 ``[B]``: rows and keys of each sequence; what lies beyond is padding.

    Returns
    -------
    tuple of Tensor
        Attention ``[B, Hq, R, D]`` in the dtype of `q` and the log-sum-exp of the scaled scores, float32
        ``[B, Hq, R]``. Padding rows and rows that see no key are zero and minus infinity.

    Raises
    ------
    ValueError
        If shapes do not fit, positions are negative or not strictly ascending, or lengths lie outside the tensors.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.

    Notes
    -----
    In plain torch this is the reference, which forms all scores; :func:`fused_kv_kernels.row_attention` is the fast
    path on CPUs. Checking positions waits for the device: once a forward pass, :class:`fused_kv_kernels.RowPlan` does.
    """
    _check(q, k, v, q_positions, scale, kv_positions, q_lengths, kv_lengths)
    extras = {"kv_positions": kv_positions, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    if use_triton("row attention", q_positions, *extras.values(), q=q, k=k, v=v):
        out, lse = triton_op("row_attention", q.device)(q, k, v, q_positions, Scoring(scale), **extras)
        return out, lse
    return batched_row_attention_reference(q, k, v, q_positions, scale, **extras)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    scale: float,
    kv_positions: Tensor | None,
    q_lengths: Tensor | None,
    kv_lengths: Tensor | None,
) -> None:
    batch, q_heads, rows, dim = q.shape
    fits = (
        k.shape == v.shape
        and k.shape[0] == batch
        and k.shape[3] == dim
        and k.shape[1] > 0
        and q_heads % k.shape[1] == 0
    )
    keys = k.shape[2]
    positions_fit = q_positions.shape in ((rows,), (batch, rows))
    keys_fit = kv_positions is None or kv_positions.shape in ((keys,), (batch, keys))
    if not (fits and positions_fit and keys_fit):
        msg = (
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, q_positions {list(q_positions.shape)} and "
            f"kv_positions {None if kv_positions is None else list(kv_positions.shape)} do not fit together"
        )
        raise ValueError(msg)
    if scale <= 0:
        msg = f"scale={scale} must be positive"
        raise ValueError(msg)
    for name, lengths, most in (("q_lengths", q_lengths, rows), ("kv_lengths", kv_lengths, keys)):
        if lengths is None:
            continue
        if lengths.shape != (batch,) or bool(((lengths < 0) | (lengths > most)).any()):
            msg = f"{name}={lengths.tolist()} must be {batch} numbers from 0 to {most}"
            raise ValueError(msg)
    table = q_positions.expand(batch, rows)
    inside = torch.arange(rows, device=q.device).expand(batch, rows)
    inside = inside < (rows if q_lengths is None else q_lengths[:, None])
    wrong = inside & (table < 0)
    wrong[:, 1:] |= inside[:, 1:] & (table[:, 1:] <= table[:, :-1])
    if bool(wrong.any()):
        msg = "query positions must be strictly ascending and not negative: sort them and drop duplicates"
        raise ValueError(msg)
