"""The probe: a cheap forward of the question that scores the context tokens.

FusionRAG section 3.2 prefills the question alone; ProphetKV lets it attend to the whole context; QCFuse
(section 3) looks at a few layers only. Here one pass serves all: it stops after the last layer that is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, row_attention, token_scores
from fused_kv_llm.model import FusedCache, LoadedModel, StopForwardError, forward_kv
from fused_kv_llm.selectors import View

from .request import Request

__all__ = ["probe_scores"]


class _ProbePass:
    """Attention of the probe: attends to the visible keys, scores all available ones in the view's layers."""

    def __init__(self, cache: FusedCache, view: View, plan: RowPlan, available: Tensor, question: int) -> None:
        self.cache = cache
        self.view = view
        self.plan = plan
        self.available = available
        self.question = question
        self.indices = torch.searchsorted(available, cache.rows[-question:])
        self.scores: list[Tensor] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Score the context where the view asks for it; return the attention output."""
        if layer_idx in self.view.layers:
            if self.view.anchors is None:
                self.cache.fill(layer_idx)
            keys = k[0] if self.view.full_context else self.cache.keys[layer_idx, 0].index_select(1, self.available)
            self.scores.append(token_scores(q[0, :, -self.question :], keys, self.indices, scale))
        if layer_idx == self.view.layers[-1]:
            raise StopForwardError
        return row_attention(q, k, v, self.plan, scale)


def probe_scores(
    loaded: LoadedModel, request: Request, cache: FusedCache, view: View, anchors: Tensor | None = None
) -> Tensor:
    """Score every reusable chunk token by the question's attention to it.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    cache : FusedCache
        Holds the prefix; its filler brings the chunks, unless the view has anchors: then their KV and the view's
        keys are in it already. The question's rows are written into it and computed again by the fused pass.
    view : View
        Layers to look at, and whether the question sees the chunks on its way.
    anchors : Tensor or None
        int64, ascending: the prompt positions the question sees of the chunks.

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
    seen = prefix if anchors is None else torch.cat((prefix, anchors))
    visible = available if view.full_context else torch.cat((seen, rows)).sort().values
    cache.rows, cache.visible = rows.to(device), visible.to(device)
    cache.fill_on_update = view.full_context
    plan = RowPlan(torch.searchsorted(visible, rows).to(device), int(visible.shape[0]))
    state = _ProbePass(cache, view, plan, available.to(device), question)
    ids = torch.tensor(request.ids)[rows]
    try:
        forward_kv(loaded, ids[None].to(device), rows.to(device), cache, state)
    finally:
        cache.fill_on_update = True
    return torch.stack(state.scores).cpu()[:, torch.searchsorted(available, chunk)]
