"""Recomputation that stops early for chunks the question does not look at (Cache-Craft section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, token_scores
from fused_kv_llm.model import FusedCache, RowPass
from fused_kv_llm.selectors import focused_chunks

from .request import Request

__all__ = ["FocusPass"]


class FocusPass(RowPass):
    """A fused pass that watches the question's attention to every chunk, layer by layer.

    Once the chunks in focus have been the same for `window` layers, recomputed rows of the other chunks are no
    longer written: from the next layer on those tokens keep their stored KV. The rows stay in the forward, so the
    result is the paper's and the time is not saved.

    Parameters
    ----------
    plan : RowPlan
    final_layer : int
    cache : FusedCache
        Its `rows` are those of the pass.
    request : Request
    window : int
    """

    def __init__(self, plan: RowPlan, final_layer: int, cache: FusedCache, request: Request, window: int) -> None:
        super().__init__(plan, final_layer)
        self.question = request.question_rows()[1]
        self.window = window
        self.positions = cache.rows[-self.question :]
        self.kind = request.kind.to(cache.rows.device)
        self.rows = cache.rows
        self.attention = torch.zeros(len(request.placements))
        self.history: list[frozenset[int]] = []
        self.written: Tensor | None = None

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[1, Hq, R, D]``."""
        if self.written is None and layer_idx != self.final_layer:
            scores = token_scores(q[0, :, -self.question :], k[0], self.positions, scale)
            inside = self.kind >= 0
            self.attention.index_add_(0, self.kind[inside].cpu(), scores[inside].float().cpu())
            self._decide()
        return super().attend(layer_idx, q, k, v, scale)

    def _decide(self) -> None:
        self.history.append(focused_chunks(self.attention))
        if len(self.history) > self.window and len(set(self.history[-self.window :])) == 1:
            focus = torch.tensor(sorted(self.history[-1]), device=self.kind.device)
            kind = self.kind[self.rows]
            self.written = ((kind < 0) | torch.isin(kind, focus)).nonzero()[:, 0]

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Return the rows that are still written."""
        return self.written
