"""Decode attention: one new token of each of several sequences, written to its cache and attended to it.

The linear layers of a step are computed over the tokens of all sequences at once. Attention is by sequence, each with a
cache of its own, and what it costs is reading the caches: one call a layer reads them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import use_triton
from .native import Table, cache_table, decode_attention_scratch, native_decode_attention, supports
from .row_attention import row_attention
from .row_plan import RowPlan
from .scoring import Scoring, check_first_keys

__all__ = ["DecodeCaches", "decode_attention"]


class DecodeCaches:
    """The caches of the sequences of one step, and where each one's new token stands; the same for all layers.

    Parameters
    ----------
    caches : sequence of (Tensor, Tensor)
        Keys ``[L, 1, Hkv, capacity, D]`` and values ``[L, 1, Hkv, capacity, Dv]`` of each sequence, rows one after
        another. Capacities may differ. They are written to.
    positions : sequence of int
        Where the new tokens stand, each in its own cache.

    Raises
    ------
    ValueError
        If there are not as many positions as caches, the caches' shapes, dtypes or devices do not fit together, a
        position lies outside its cache, or a cache is named twice.
    """

    def __init__(self, caches: Sequence[tuple[Tensor, Tensor]], positions: Sequence[int]) -> None:
        self.caches, self.positions = list(caches), list(positions)
        self._check()
        self.entries: Table | None = None
        if caches and all(_has_dense_rows(part) for pair in caches for part in pair) and supports(*caches[0]):
            self.entries = cache_table(self.caches, self.positions)
        self._scratch: dict[tuple[int, ...], Tensor] = {}
        self._windows: list[tuple[Tensor, Tensor]] = []
        self._plans: dict[tuple[int, int], RowPlan] = {}

    @property
    def num_rows(self) -> int:
        """Number of sequences, each of which has one row."""
        return len(self.positions)

    def _check(self) -> None:
        if len(self.caches) != len(self.positions):
            msg = f"{len(self.caches)} caches need as many positions (got {len(self.positions)})"
            raise ValueError(msg)
        if not self.caches:
            return
        kinds = {_kind(pair) for pair in self.caches}
        pairs_fit = all(keys.dim() == values.dim() == 5 and keys.shape[:4] == values.shape[:4] and keys.shape[1] == 1
                        for keys, values in self.caches)  # fmt: skip
        if len(kinds) > 1 or not pairs_fit:
            shapes = [[list(part.shape) for part in pair] for pair in self.caches]
            msg = f"caches {shapes} do not fit together: but for their capacities they must be alike, with batches of 1"
            raise ValueError(msg)
        for (keys, _), position in zip(self.caches, self.positions, strict=True):
            if not 0 <= position < keys.shape[3]:
                msg = f"position {position} lies outside a cache with room for {keys.shape[3]} tokens"
                raise ValueError(msg)
        addresses = [part.data_ptr() for pair in self.caches for part in pair]
        if len(set(addresses)) < len(addresses):
            msg = "a cache is named twice: a sequence has one new token, and keys and values have memory of their own"
            raise ValueError(msg)

    def check(self, q: Tensor, k: Tensor, v: Tensor, layer_idx: int) -> None:
        """Refuse rows that do not fit the caches, by whose shapes memory is then read and written.

        Raises
        ------
        ValueError
            If the shapes, dtypes or devices do not fit together, or there is no such layer.
        """
        one, q_heads, rows, dim = q.shape
        fits = k.shape[:3] == v.shape[:3] == (1, k.shape[1], rows) and (one, k.shape[3]) == (1, dim)
        fits = fits and k.shape[1] > 0 and q_heads % k.shape[1] == 0
        if not fits or rows != self.num_rows:
            msg = (
                f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together or not the "
                f"{self.num_rows} sequences that the caches are of"
            )
            raise ValueError(msg)
        if not rows:
            return
        keys, values = self.caches[0]
        same = {(x.dtype, x.device) for x in (q, k, v, keys, values)}
        if len(same) > 1 or (keys.shape[2], keys.shape[4], values.shape[4]) != (k.shape[1], dim, v.shape[3]):
            described = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in (q, k, v, keys, values)]
            msg = f"q, k and v do not fit the caches' keys and values ({', '.join(described)})"
            raise ValueError(msg)
        if not 0 <= layer_idx < keys.shape[0]:
            msg = f"the caches have no layer {layer_idx}: they are counted from 0, and there are {keys.shape[0]}"
            raise ValueError(msg)

    def checked_window(self, first_keys: Tensor | None) -> Tensor | None:
        """Return the first key that each row sees, int64 and dense; looked at once a step.

        Raises
        ------
        ValueError
            If there is not one for each row, or one lies outside ``0 .. position``.
        """
        if first_keys is None:
            return None
        for given, checked in self._windows:
            if given is first_keys:
                return checked
        check_first_keys(first_keys, torch.tensor(self.positions, device=first_keys.device))
        self._windows.append((first_keys, first_keys.to(torch.int64).contiguous()))
        return self._windows[-1][1]

    def scratch(self, q_heads: int) -> Tensor:
        """Return working memory of the native operator for so many query heads; one for all layers."""
        keys, values = self.caches[0]
        shape = q_heads, keys.shape[2], self.num_rows, keys.shape[4], values.shape[4]
        if shape not in self._scratch and self.entries is not None:
            nbytes = decode_attention_scratch(keys.dtype, self.entries, shape)
            self._scratch[shape] = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[shape]

    def plan(self, row: int, first_key: int) -> RowPlan:
        """Return the plan of one row by itself that sees keys from `first_key` on; made once a step."""
        if (row, first_key) not in self._plans:
            position, device = self.positions[row], self.caches[row][0].device
            at, first = (torch.tensor([number], device=device) for number in (position, first_key))
            self._plans[row, first_key] = RowPlan(at, position + 1, first_keys=first)
        return self._plans[row, first_key]


def _has_dense_rows(part: Tensor) -> bool:
    return part.stride(4) == 1 and part.stride(3) == part.shape[4]


def _kind(pair: tuple[Tensor, Tensor]) -> tuple[object, ...]:
    keys, values = pair
    return keys.shape[:3], keys.shape[4:], values.shape[4:], keys.dtype, values.dtype, keys.device, values.device


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: DecodeCaches,
    layer_idx: int,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    first_keys: Tensor | None = None,
) -> Tensor:
    """Write the key and value of each sequence's new token to its cache, and attend the token to what is there.

    Parameters
    ----------
    q : Tensor
        ``[1, Hq, R, D]``: row ``r`` is the new token of sequence ``r``.
    k, v : Tensor
        ``[1, Hkv, R, D]`` and ``[1, Hkv, R, Dv]``; ``Hq`` is a multiple of ``Hkv``.
    caches : DecodeCaches
        Row ``r`` is written at ``positions[r]``, and sees the keys up to there.
    layer_idx : int
        Of the caches.
    scale : float
        Multiplies the scores.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)``.
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the softmax's denominator, which has no value.
    first_keys : Tensor, optional
        int64 ``[R]``: the first key that each row sees, 0 without it. Its values are looked at once a step.

    Returns
    -------
    Tensor
        ``[1, Hq, R, Dv]`` in the dtype of `q`, laid out ``[1, R, Hq, Dv]`` in memory, as an output projection reads it.
        A row is the same, bit by bit, whichever other rows there are.

    Raises
    ------
    ValueError
        If the shapes, dtypes or devices do not fit together, or there is no such layer.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.

    Notes
    -----
    A native operator in bfloat16 and float32 on a CPU, whose results do not depend on the number of threads either;
    elsewhere row by row :func:`fused_kv_kernels.row_attention`.
    """
    scoring = Scoring(scale, softcap, sinks)
    caches.check(q, k, v, layer_idx)
    scoring.check(q.shape[1], q.device)
    if caches.num_rows == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    first_keys = caches.checked_window(first_keys)
    on_triton = use_triton("decode attention", q=q, k=k, v=v)
    if caches.entries is not None and not on_triton and supports(q, k, v):
        scratch = caches.scratch(q.shape[1])
        return native_decode_attention(q, k, v, caches.entries, layer_idx, first_keys, scoring, scratch)
    return _row_by_row(q, k, v, caches, layer_idx, scoring, first_keys)


def _row_by_row(
    q: Tensor, k: Tensor, v: Tensor, caches: DecodeCaches, layer_idx: int, scoring: Scoring, first_keys: Tensor | None
) -> Tensor:
    """Do the same with an attention call for each sequence."""
    out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    firsts = [0] * caches.num_rows if first_keys is None else first_keys.tolist()
    options: dict[str, Any] = {"softcap": scoring.softcap, "sinks": scoring.sinks}
    for row, ((keys, values), position) in enumerate(zip(caches.caches, caches.positions, strict=True)):
        span, layer = slice(row, row + 1), (keys[layer_idx], values[layer_idx])
        for part, new in zip(layer, (k, v), strict=True):
            part[:, :, position] = new[:, :, row]
        k_seen, v_seen = (part[:, :, : position + 1] for part in layer)
        plan = caches.plan(row, firsts[row])
        out[:, :, span] = row_attention(q[:, :, span], k_seen, v_seen, plan, scoring.scale, **options)
    return out
