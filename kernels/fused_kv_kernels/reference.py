"""Every operator in plain torch: the specification, and the oracle of the tests.

Clarity comes before speed. All arithmetic is done in float32 (float64 stays float64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "batched_row_attention_reference",
    "kv_deviation_reference",
    "place_chunks_reference",
    "rerotate_keys_reference",
    "row_attention_reference",
    "token_scores_reference",
]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _row_weights(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    first_keys: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the softmax weights ``[B, Hq, R, N]`` of scattered query rows, causal by true position."""
    batch, q_heads, rows, _ = q.shape
    keys = _wide(k).repeat_interleave(q_heads // k.shape[1], dim=1)
    scores = _wide(q) @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    columns = torch.arange(k.shape[2], device=k.device)[None, :]
    hidden = columns > q_positions[:, None]
    if first_keys is not None:
        hidden = hidden | (columns < first_keys[:, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1)
    beside = sinks.to(scores.dtype)[None, :, None, None].expand(batch, q_heads, rows, 1)
    return torch.cat((scores, beside), dim=-1).softmax(dim=-1)[..., :-1]


def row_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    first_keys: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend scattered query rows to a whole key/value sequence, causal by true position.

    The mask is the one of CacheBlend's sparse prefill as FusionRAG section 2.2.2 (equation 9) gives it:
    row ``i`` sees key ``j`` if and only if ``j <= q_positions[i]``, and not before its window's first.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    k, v : Tensor
        ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]`` with ``Hq`` a multiple of ``Hkv``.
    q_positions : Tensor
        int64 ``[R]``: the last key that each row sees.
    scale : float
        Multiplies the scores.
    first_keys : Tensor, optional
        int64 ``[R]``: the first key that each row sees, 0 without it.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)``, before the mask.
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the softmax's denominator, which has no value.

    Returns
    -------
    Tensor
        ``[B, Hq, R, Dv]`` in the dtype of `q`.
    """
    values = _wide(v).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (_row_weights(q, k, q_positions, scale, first_keys, softcap, sinks) @ values).to(q.dtype)


def batched_row_attention_reference(
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
    """Attend scattered query rows, with positions and lengths of each sequence's own.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    k, v : Tensor
        ``[B, Hkv, N, D]``.
    q_positions : Tensor
        int64 ``[R]`` or ``[B, R]``.
    scale : float
        Multiplies the scores.
    kv_positions : Tensor, optional
        int64 ``[N]`` or ``[B, N]``: row ``i`` sees key ``j`` if and only if ``kv_positions[j] <= q_positions[i]``.
    q_lengths, kv_lengths : Tensor, optional
        int64 ``[B]``.

    Returns
    -------
    tuple of Tensor
        ``[B, Hq, R, D]`` in the dtype of `q` and the log-sum-exp, float32 ``[B, Hq, R]``; zero and minus infinity for
        rows that see no key or lie beyond their sequence's length.
    """
    batch, q_heads, rows, _ = q.shape
    groups, num_keys = q_heads // k.shape[1], k.shape[2]
    columns = torch.arange(num_keys, device=k.device)
    stands = (columns if kv_positions is None else kv_positions).expand(batch, num_keys)
    seen = stands[:, None, :] <= q_positions.expand(batch, rows)[:, :, None]
    if kv_lengths is not None:
        seen = seen & (columns < kv_lengths[:, None])[:, None, :]
    if q_lengths is not None:
        seen = seen & (torch.arange(rows, device=q.device) < q_lengths[:, None])[:, :, None]
    scores = _wide(q) @ _wide(k).repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    # A row that sees nothing has no softmax; values that it does not see may be anything.
    weights = scores.softmax(dim=-1).nan_to_num(nan=0.0)
    values = _wide(v).masked_fill(~seen.any(dim=1)[:, None, :, None], 0.0)
    out = weights @ values.repeat_interleave(groups, dim=1)
    return out.to(q.dtype), scores.logsumexp(dim=-1).float()


def token_scores_reference(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    first_keys: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Score every key by the attention it receives from the query rows.

    FusionRAG section 3.2 sums each column of the question's attention matrix; the mean over rows and
    heads ranks the same and does not depend on their number.

    Parameters
    ----------
    q : Tensor
        ``[Hq, R, D]``, the question's rotated queries.
    k : Tensor
        ``[Hkv, N, D]``, rotated keys.
    q_positions : Tensor
        int64 ``[R]``, indices into the key axis; row ``i`` sees keys ``first_keys[i] .. q_positions[i]``.
    scale : float
        Multiplies the scores.
    first_keys : Tensor, optional
        int64 ``[R]``, 0 without it.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)``.
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the denominator.

    Returns
    -------
    Tensor
        float32 ``[N]``: softmax mass with the full denominator, mean over rows and heads.
    """
    weights = _row_weights(q[None], k[None], q_positions, scale, first_keys, softcap, sinks)[0]
    return weights.mean(dim=(0, 1)).float()


def kv_deviation_reference(
    fresh_keys: Tensor,
    fresh_values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    fresh_rows: Tensor,
    stored_rows: Tensor,
) -> Tensor:
    """Return how far tokens' fresh KV is from the stored one: CacheBlend's deviation.

    Parameters
    ----------
    fresh_keys, fresh_values : Tensor
        ``[Hk, R, Dk]`` and ``[Hv, R, Dv]``.
    stored_keys, stored_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``.
    fresh_rows, stored_rows : Tensor
        int64 ``[T]``: where the tokens stand in either.

    Returns
    -------
    Tensor
        float32 ``[T]``: the root of the squared gaps summed over keys, values, heads and dimensions.
    """
    fresh = (_wide(part.index_select(1, fresh_rows)) for part in (fresh_keys, fresh_values))
    stored = (_wide(part.index_select(1, stored_rows)) for part in (stored_keys, stored_values))
    key_gap, value_gap = ((new - old).square().sum(dim=(0, 2)) for new, old in zip(fresh, stored, strict=True))
    return (key_gap + value_gap).sqrt().float()


def rerotate_keys_reference(keys: Tensor, deltas: Tensor, inv_freq: Tensor, interleaved: bool = False) -> Tensor:
    """Move rotated keys by a number of positions.

    Rotary embedding is a rotation, so ``R(p + delta) k = R(delta) R(p) k``: a key need not be un-rotated
    first. Dimensions ``d`` and ``d + rotary/2`` form a pair (half-split layout), or ``2 d`` and ``2 d + 1``
    (interleaved); dimensions beyond the rotary ones carry no position and are returned unchanged.

    Parameters
    ----------
    keys : Tensor
        ``[..., T, D]``.
    deltas : Tensor
        int64 ``[T]``, positions to move each key by.
    inv_freq : Tensor
        ``[rotary / 2]``, the layer's own frequencies; negative ones rotate the other way.
    interleaved : bool
        The layout of the pairs.

    Returns
    -------
    Tensor
        Like `keys`.
    """
    wide = _wide(keys)
    half = inv_freq.shape[0]
    angle = deltas.to(torch.float64)[:, None] * inv_freq.to(torch.float64)[None, :]
    cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
    pairs = wide[..., : 2 * half].reshape(*wide.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1 if interleaved else -2)
    return torch.cat((turned.flatten(-2), wide[..., 2 * half :]), dim=-1).to(keys.dtype)


def place_chunks_reference(
    chunks: Sequence[tuple[Tensor, Tensor]],
    starts: Sequence[int],
    deltas: Sequence[int],
    inv_freq: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: Sequence[tuple[Tensor, Tensor]] | None = None,
    interleaved: bool = False,
) -> None:
    """Write the KV of several chunks into one layer, each chunk's keys moved by its own distance.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys ``[Hk, T, Dk]`` and values ``[Hv, T, Dv]`` of every chunk, floating or int8.
    starts, deltas : sequence of int
        Where each chunk begins in the layer, and how far its keys are moved.
    inv_freq : Tensor
        ``[rotary / 2]``.
    layer_keys, layer_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``, written in place, rounded once.
    scales : sequence of (Tensor, Tensor), optional
        What int8 keys ``[Hk, 1, Dk]`` and values ``[Hv, T, 1]`` are multiplied by.
    interleaved : bool
        The layout of the rotary pairs.
    """
    for index, ((keys, values), start, delta) in enumerate(zip(chunks, starts, deltas, strict=True)):
        key_scale, value_scale = (1.0, 1.0) if scales is None else (scale.float() for scale in scales[index])
        span = slice(start, start + keys.shape[1])
        moves = torch.full((keys.shape[1],), delta, device=keys.device)
        layer_keys[:, span] = rerotate_keys_reference(keys.float() * key_scale, moves, inv_freq, interleaved)
        layer_values[:, span] = (values.float() * value_scale).to(layer_values.dtype)
