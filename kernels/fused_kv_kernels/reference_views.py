"""Attention over chunk views in plain torch: each term by itself, nothing copied."""

from __future__ import annotations

import torch
from torch import Tensor

from .chunk_views import ChunkView, LayerRotations, SequenceView
from .reference import rerotate_keys_reference
from .rotate import rotate_in_torch
from .scoring import Scoring

__all__ = ["view_attention_reference"]


def view_attention_reference(
    q: Tensor,
    view: SequenceView,
    own_tokens: int,
    layer_idx: int,
    scoring: Scoring,
) -> Tensor:
    """Attend one row of a sequence to all that the sequence sees.

    With the query ``q`` and its copy ``q~`` that is moved back by a chunk's distance, token ``i`` of the chunk scores

        q~ . K_i  +  a q~ . S_i  +  q . R(p_i) u

    for its key, the key's shift and the vector that deviation transfer adds; its weight then multiplies
    ``V_i + b S'_i + w``.

    Parameters
    ----------
    q : Tensor
        ``[Hq, D]``, rotated to its position, behind all that the sequence sees.
    view : SequenceView
    own_tokens : int
        Rows of its own cache that are filled.
    layer_idx : int
    scoring : Scoring

    Returns
    -------
    Tensor
        ``[Hq, Dv]`` in the dtype of `q`.
    """
    own = [part[layer_idx, 0, :, :own_tokens].float() for part in (view.keys, view.values)]
    groups = q.shape[0] // own[0].shape[0]
    wide = q.float().view(own[0].shape[0], groups, -1)
    scores = [wide @ own[0].transpose(1, 2)]
    values = [own[1]]
    for chunk in view.chunks:
        seen = torch.ones(chunk.chunk.num_tokens, dtype=torch.bool)
        seen[chunk.hidden] = False
        scores.append(_chunk_scores(wide, chunk, layer_idx, view.rotations)[..., seen])
        values.append(_chunk_values(chunk, layer_idx)[:, seen])
    whole = scoring.capped_(torch.cat(scores, dim=2) * scoring.scale)
    if scoring.sinks is not None:
        whole = torch.cat((whole, scoring.sinks.float().view(-1, groups, 1)), dim=2)
    weights = whole.softmax(dim=-1)[..., : sum(part.shape[1] for part in values)]
    return (weights @ torch.cat(values, dim=1)).flatten(0, 1).to(q.dtype)


def _chunk_scores(q: Tensor, view: ChunkView, layer_idx: int, rotations: LayerRotations) -> Tensor:
    """``[Hkv, G, T]``, neither scaled nor capped."""
    inv_freq = rotations.kinds[rotations.kind_of[layer_idx]]
    # Computed once for all tokens: what is moved is the query.
    back = torch.full((q.shape[1],), -view.delta)
    moved = rerotate_keys_reference(q, back, inv_freq, rotations.interleaved)
    scores = moved @ view.chunk.keys[layer_idx].float().transpose(1, 2)
    if view.chunk.shifts is not None and view.weights is not None:
        whole, scale = (part[layer_idx].float() for part in view.chunk.shifts[0])
        scores = scores + float(view.weights[layer_idx, 0]) * (moved @ (whole * scale).transpose(1, 2))
    if view.vectors is not None:
        positions = view.start + torch.arange(view.chunk.num_tokens)
        table = rotations.tables(positions)[rotations.kind_of[layer_idx]]
        added = view.vectors[0][layer_idx][:, None].expand(-1, len(table), -1)
        at_tokens = rotate_in_torch(added, table.cos, table.sin, table.interleaved)
        scores = scores + q @ at_tokens.transpose(1, 2)
    return scores


def _chunk_values(view: ChunkView, layer_idx: int) -> Tensor:
    """``[Hkv, T, Dv]``; a weighted sum of these is the sum of weighted sums."""
    values = view.chunk.values[layer_idx].float()
    if view.chunk.shifts is not None and view.weights is not None:
        whole, scale = (part[layer_idx].float() for part in view.chunk.shifts[1])
        values = values + float(view.weights[layer_idx, 1]) * (whole * scale)
    if view.vectors is not None:
        values = values + view.vectors[1][layer_idx][:, None]
    return values
