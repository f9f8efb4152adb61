"""Token scores: how much attention each key receives from the question."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_token_scores, supports

__all__ = ["token_scores"]


def token_scores(q: Tensor, k: Tensor, q_positions: Tensor, scale: float) -> Tensor:
    """Score every key by the attention mass it receives from the query rows.

    FusionRAG section 3.2 (Query-Guided Selection) with the full softmax denominator.

    Parameters
    ----------
    q : Tensor
        ``[Hq, R, D]``, the question's rotated queries, or those of several layers ``[L, Hq, R, D]``.
    k : Tensor
        ``[Hkv, N, D]`` or ``[L, Hkv, N, D]``, rotated keys; ``Hq`` is a multiple of ``Hkv``.
    q_positions : Tensor
        int64 ``[R]``, indices into the key axis; row ``i`` sees keys ``0 .. q_positions[i]``.
    scale : float
        Multiplies the scores.

    Returns
    -------
    Tensor
        float32 ``[N]``, mean over rows, heads and layers; sums to one.

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
    if use_triton("token scores", q_positions, q=q, k=k):
        in_layers = (q, k) if q.dim() == 4 else (q[None], k[None])
        found: Tensor = triton_op("token_scores", q.device)(*in_layers, q_positions, scale)
        return found
    if q.dim() == 4:
        return torch.stack([token_scores(*layer, q_positions, scale) for layer in zip(q, k, strict=True)]).mean(0)
    q_heads, rows, dim = q.shape
    kv_heads, num_keys, _ = k.shape
    groups = q_heads // kv_heads
    if rows == 0:
        return torch.zeros(num_keys, dtype=torch.float32, device=k.device)
    least, most = (int(x) for x in q_positions.aminmax())
    if least < 0 or most >= num_keys:
        msg = f"query positions {least}..{most} lie outside the {num_keys} keys"
        raise ValueError(msg)
    ascending = bool((q_positions[1:] > q_positions[:-1]).all())
    if ascending and supports(q, k):
        return native_token_scores(q, k, q_positions, scale)
    scores = torch.bmm((q * scale).reshape(kv_heads, groups * rows, dim), k.transpose(1, 2)).float()
    first_future = least + 1
    future = torch.arange(first_future, num_keys, device=k.device)[None, :] > q_positions[:, None]
    scores.view(kv_heads, groups, rows, num_keys)[..., first_future:].masked_fill_(future, float("-inf"))
    return scores.softmax(dim=-1).sum(dim=(0, 1)) / (q_heads * rows)
