"""The probe: a cheap forward of the question that scores the context tokens.

FusionRAG section 3.2 prefills the question alone; ProphetKV lets it attend to the whole context; QCFuse
(section 3) looks at a few layers only. Here one pass serves all: it stops after the last layer that is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, row_attention, token_scores
from fused_kv_llm.model import FusedCache, LoadedModel, StopForwardError, forward_kv
from fused_kv_llm.selectors import View

from .anchors import ChunkAnchors
from .request import Request

__all__ = ["probe_scores"]

_Keys = Callable[[int, Tensor], Tensor]
"""From a layer's index and the keys that the question sees there, to the keys that are scored ``[Hkv, N, D]``."""


class _ProbePass:
    """Attention of the probe: attends to the visible keys, scores all available ones in the view's layers."""

    def __init__(self, view: View, plan: RowPlan, keys: _Keys, indices: Tensor) -> None:
        self.view = view
        self.plan = plan
        self.keys = keys
        self.indices = indices
        self.scores: list[Tensor] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Score the context where the view asks for it; return the attention output."""
        if layer_idx in self.view.layers:
            question = q[0, :, -self.indices.shape[0] :]
            self.scores.append(token_scores(question, self.keys(layer_idx, k[0]), self.indices, scale))
        if layer_idx == self.view.layers[-1]:
            raise StopForwardError
        return row_attention(q, k, v, self.plan, scale)


def probe_scores(
    loaded: LoadedModel, request: Request, cache: FusedCache, view: View, anchors: ChunkAnchors | None = None
) -> Tensor:
    """Score every reusable chunk token by the question's attention to it.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    cache : FusedCache
        Holds the prefix; its filler brings the chunks, unless the view has anchors. What is written into it behind the
        prefix, the question's rows among it, is written again by the loader and the fused pass.
    view : View
        Layers to look at, and whether the question sees the chunks on its way.
    anchors : ChunkAnchors or None
        What a view with anchors sees of the chunks.

    Returns
    -------
    Tensor
        float32 ``[len(view.layers), C]``, by layer, aligned with ``request.chunk_positions``.
    """
    device = loaded.device
    rows, question = request.question_rows()
    prefix = torch.arange(request.prefix_tokens)
    chunk = request.chunk_positions
    available = torch.cat((prefix, chunk, rows)).sort().values
    seen = () if anchors is None else anchors.positions
    visible = available if view.full_context else torch.cat((prefix, *seen, rows)).sort().values
    at = torch.searchsorted(visible, rows).to(device)
    indices = torch.searchsorted(available, rows[-question:]).to(device)
    keys: _Keys
    if anchors is None:
        cache.rows, cache.visible = rows.to(device), visible.to(device)
        keys = _of_whole_layers(cache, view, available.to(device))
    else:
        cache.rows, cache.visible = at, visible.shape[0]
        scored = anchors.place(cache, visible, available, len(view.layers))
        scored[:, :, : request.prefix_tokens] = cache.keys[list(view.layers), 0, :, : request.prefix_tokens]
        keys = _of_side_files(scored, view, torch.searchsorted(available, rows).to(device), at)
    cache.fill_on_update = view.full_context
    state = _ProbePass(view, RowPlan(at, int(visible.shape[0])), keys, indices)
    ids = torch.tensor(request.ids)[rows]
    try:
        forward_kv(loaded, ids[None].to(device), rows.to(device), cache, state)
    finally:
        cache.fill_on_update = True
    return torch.stack(state.scores).cpu()[:, torch.searchsorted(available, chunk)]


def _of_whole_layers(cache: FusedCache, view: View, available: Tensor) -> _Keys:
    """Return what gives the available keys of a layer out of all that is stored of it."""

    def keys(layer_idx: int, visible: Tensor) -> Tensor:
        if view.full_context:
            return visible
        cache.fill(layer_idx)
        return cache.keys[layer_idx, 0].index_select(1, available)

    return keys


def _of_side_files(scored: Tensor, view: View, to: Tensor, at: Tensor) -> _Keys:
    """Return what gives the available keys of a layer: header and chunks are there, the question's rows are added."""

    def keys(layer_idx: int, visible: Tensor) -> Tensor:
        layer = scored[view.layers.index(layer_idx)]
        return layer.index_copy_(1, to, visible.index_select(1, at))

    return keys
