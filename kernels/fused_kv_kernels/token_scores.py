"""Token scores: how much attention each key receives from the question."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_token_scores, supports
from .scoring import Scoring, check_first_keys

__all__ = ["token_scores"]


def token_scores(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    first_keys: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Score every key by the attention mass it receives from the query rows.

    FusionRAG section 3.2 (Query-Guided Selection) with the full softmax denominator.

    Parameters
    ----------
    q : Tensor
        ``[Hq, R, D]``, the question's rotated queries, or those of several layers ``[L, Hq, R, D]``.
    k : Tensor
        ``[Hkv, N, D]`` or ``[L, Hkv, N, D]``, rotated keys; ``Hq`` is a multiple of ``Hkv``.
    q_positions : Tensor
        int64 ``[R]``, indices into the key axis; row ``i`` sees keys ``first_keys[i] .. q_positions[i]``.
    scale : float
        Multiplies the scores.
    first_keys : Tensor, optional
        int64 ``[R]``; without it, rows see all keys from the first one on.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)``.
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the softmax's denominator.

    Returns
    -------
    Tensor
        float32 ``[N]``, mean over rows, heads and layers; sums to one, with sinks to less.

    Raises
    ------
    ValueError
        If the shapes do not fit together or, on a CPU, a position lies outside the keys.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    heads_fit = k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0 and q.shape[:-3] == k.shape[:-3]
    if not heads_fit or q.shape[-1] != k.shape[-1] or q_positions.shape != q.shape[-2:-1]:
        msg = f"q {list(q.shape)}, k {list(k.shape)} and q_positions {list(q_positions.shape)} do not fit together"
        raise ValueError(msg)
    scoring = Scoring(scale, softcap, sinks)
    scoring.check(q.shape[-3], q.device)
    if use_triton("token scores", q_positions, first_keys, q=q, k=k):
        in_layers = (q, k) if q.dim() == 4 else (q[None], k[None])
        found: Tensor = triton_op("token_scores", q.device)(*in_layers, q_positions, scoring, first_keys)
        return found
    if q.dim() == 4:
        return torch.stack(
            [_of_layer(*layer, q_positions, scoring, first_keys) for layer in zip(q, k, strict=True)]
        ).mean(0)
    return _of_layer(q, k, q_positions, scoring, first_keys)


def _of_layer(q: Tensor, k: Tensor, q_positions: Tensor, scoring: Scoring, first_keys: Tensor | None) -> Tensor:
    num_keys = k.shape[1]
    if q.shape[1] == 0:
        return torch.zeros(num_keys, dtype=torch.float32, device=k.device)
    least, most = (int(x) for x in q_positions.aminmax())
    if least < 0 or most >= num_keys:
        msg = f"query positions {least}..{most} lie outside the {num_keys} keys"
        raise ValueError(msg)
    if first_keys is not None:
        check_first_keys(first_keys, q_positions)
    ascending = bool((q_positions[1:] > q_positions[:-1]).all())
    ascending = ascending and (first_keys is None or bool((first_keys[1:] >= first_keys[:-1]).all()))
    if ascending and supports(q, k):
        return native_token_scores(q, k, q_positions, first_keys, scoring)
    return _in_torch(q, k, q_positions, scoring, first_keys)


def _in_torch(q: Tensor, k: Tensor, q_positions: Tensor, scoring: Scoring, first_keys: Tensor | None) -> Tensor:
    q_heads, rows, dim = q.shape
    kv_heads, num_keys, _ = k.shape
    groups = q_heads // kv_heads
    scores = torch.bmm((q * scoring.scale).reshape(kv_heads, groups * rows, dim), k.transpose(1, 2)).float()
    by_row = scoring.capped_(scores).view(kv_heads, groups, rows, num_keys)
    # Without windows, all rows see all keys up to the first row's.
    begin = int(q_positions.min()) + 1 if first_keys is None else 0
    columns = torch.arange(begin, num_keys, device=k.device)[None, :]
    hidden = columns > q_positions[:, None]
    if first_keys is not None:
        hidden |= columns < first_keys[:, None]
    by_row[..., begin:].masked_fill_(hidden, float("-inf"))
    weights = by_row.softmax(dim=-1)
    if scoring.sinks is not None:
        weights *= scoring.kept_share(by_row, scoring.sinks.float().view(kv_heads, groups, 1, 1))
    return weights.sum(dim=(0, 1, 2)) / (q_heads * rows)
