"""Decode attention over chunk views: one new token of each of several sequences that share chunks.

A chunk that several of them see is read once for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .chunk_views import SequenceView
from .decode_attention import DecodeCaches
from .dispatch import refuse_in_triton, use_triton
from .native import ViewTables, native_decode_views, supports, view_tables
from .reference_views import view_attention_reference
from .scoring import Scoring

__all__ = ["DecodeViews", "decode_views"]


class DecodeViews:
    """What the sequences of one step see, and where each one's new token goes; the same for all layers.

    Parameters
    ----------
    sequences : sequence of SequenceView
        All with the same rotations. Their own caches are written to.
    own_rows : sequence of int
        Rows of their own caches that the new tokens are written to; all rows before them are filled.

    Attributes
    ----------
    own : DecodeCaches
        The sequences' own caches.
    tables : ViewTables or None
        How the native operator takes all of it; None where it does not.

    Raises
    ------
    ValueError
        If the sequences do not fit together, or a row lies outside its cache.
    """

    def __init__(self, sequences: Sequence[SequenceView], own_rows: Sequence[int]) -> None:
        self.sequences = list(sequences)
        self.own = DecodeCaches([(one.keys, one.values) for one in sequences], own_rows)
        if not all(one.rotations.same_as(sequences[0].rotations) for one in sequences):
            msg = "sequences must have the same rotations: they are the model's"
            raise ValueError(msg)
        self.tables: ViewTables | None = None
        if self.own.entries is not None and all(one.is_dense for one in sequences):
            self.tables = view_tables(self.sequences, self.own.positions)

    @property
    def num_rows(self) -> int:
        """Number of sequences, each of which has one row."""
        return self.own.num_rows


def decode_views(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    views: DecodeViews,
    layer_idx: int,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the key and value of each sequence's new token to its own cache, and attend the token to all it sees.

    Parameters
    ----------
    q : Tensor
        ``[1, Hq, R, D]``: row ``r`` is the new token of sequence ``r``, rotated to its position.
    k, v : Tensor
        ``[1, Hkv, R, D]`` and ``[1, Hkv, R, Dv]``; ``Hq`` is a multiple of ``Hkv``.
    views : DecodeViews
    layer_idx : int
        Of the chunks and caches.
    scale : float
        Multiplies the scores.
    softcap : float, optional
        Scaled scores become ``softcap * tanh(scores / softcap)``.
    sinks : Tensor, optional
        ``[Hq]``: one more score for each head in the softmax's denominator, which has no value.

    Returns
    -------
    Tensor
        ``[1, Hq, R, Dv]`` in the dtype of `q`, laid out ``[1, R, Hq, Dv]`` in memory. A row is the same, bit by bit,
        whichever other rows there are.

    Raises
    ------
    ValueError
        If the shapes, dtypes or devices do not fit together, or there is no such layer.
    UnsupportedOperandsError
        If it is to run in Triton, which has no kernel for it.

    Notes
    -----
    A native operator in bfloat16 and float32 on a CPU; elsewhere the reference, row by row. Windows are not supported.
    """
    scoring = Scoring(scale, softcap, sinks)
    views.own.check(q, k, v, layer_idx)
    scoring.check(q.shape[1], q.device)
    if views.num_rows == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    if use_triton("decode attention over chunk views", q=q, k=k, v=v):
        refuse_in_triton("decode attention over chunk views", "which has no kernel for it", q=q, k=k, v=v)
    if views.tables is not None and supports(q, k, v):
        return native_decode_views(q, k, v, views.tables, layer_idx, scoring)
    return _row_by_row(q, k, v, views, layer_idx, scoring)


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, views: DecodeViews, layer_idx: int, scoring: Scoring) -> Tensor:
    out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
    for row, (one, own_row) in enumerate(zip(views.sequences, views.own.positions, strict=True)):
        for part, new in zip((one.keys, one.values), (k, v), strict=True):
            part[layer_idx, :, :, own_row] = new[:, :, row]
        out[0, row] = view_attention_reference(q[0, :, row], one, own_row + 1, layer_idx, scoring)
    return out.transpose(1, 2)
