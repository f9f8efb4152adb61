"""The early probe: every row of the prompt through the first layers, compared with the stored KV.

CacheBlend, KVShare, Prefill-H2O and Cache-Craft decide by what the first layers show. Rows that are dropped at a layer
keep their stored KV from the next one on: they are still computed, since a forward has one set of rows, but no longer
written, so that the rows which go on see exactly what they would see if the others had been left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, kv_deviation, row_attention
from fused_kv_llm.model import FusedCache, LoadedModel, StopForwardError, forward_kv
from fused_kv_llm.selectors import EarlyView, Probe

from .request import Request

__all__ = ["early_probe"]

Score = Callable[[Probe], Tensor]

_BLOCK_ROWS = 128


class _EarlyPass:
    """Attention of the early probe; also watches the rows that the cache is about to write."""

    def __init__(
        self, cache: FusedCache, request: Request, view: EarlyView, probe: Probe, budget: int, score: Score | None
    ) -> None:
        device = cache.rows.device
        self.cache, self.view, self.budget, self.score, self.probe = cache, view, budget, score, probe
        self.chunk = probe.positions.to(device)
        self.at_chunk = torch.searchsorted(cache.rows, self.chunk)
        self.kind = request.kind.to(device)
        self.plan = RowPlan(cache.rows, request.num_tokens)
        self.goes_on = torch.ones(self.chunk.shape[0], dtype=torch.bool, device=device)
        self.deviation: Tensor | None = None
        self.received = torch.zeros(2, request.num_tokens, device=device)
        self.given = torch.zeros(cache.rows.shape[0], len(request.placements), device=device)
        self.layers_seen = 0

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Compare the fresh rows with the stored ones, and drop rows for the layers to come."""
        written = None if bool(self.goes_on.all()) else self._rows_going_on()
        if layer_idx in self.view.deviation and self.score is not None:
            stored = (self.cache.keys[layer_idx, 0], self.cache.values[layer_idx, 0])
            gaps = kv_deviation(keys[0], values[0], *stored, self.at_chunk, self.chunk)
            self.deviation = torch.where(self.goes_on, gaps, -torch.inf)
            self._narrow(self.view.keep[self.view.deviation.index(layer_idx)], self.score)
        return written

    def _narrow(self, keep: float, score: Score) -> None:
        count = min(self.chunk.shape[0], math.ceil(keep * self.budget))
        best = torch.sort(score(self.result()), descending=True, stable=True).indices[:count]
        chosen = torch.zeros_like(self.goes_on)
        chosen[best.to(chosen.device)] = True
        self.goes_on &= chosen

    def _rows_going_on(self) -> Tensor:
        alive = torch.ones(self.cache.rows.shape[0], dtype=torch.bool, device=self.cache.rows.device)
        alive[self.at_chunk] = self.goes_on
        return alive.nonzero()[:, 0]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[1, Hq, R, D]``; sum up the attention where the view asks for it."""
        if layer_idx in self.view.attention:
            self._sum_up(q[0], k[0], scale)
        if layer_idx == self.view.layers[-1]:
            raise StopForwardError
        return row_attention(q, k, v, self.plan, scale)

    def _sum_up(self, q: Tensor, k: Tensor, scale: float) -> None:
        rows, groups = self.cache.rows, q.shape[0] // k.shape[0]
        alive = torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device)
        alive[self._rows_going_on()] = True
        columns = torch.arange(k.shape[1], device=k.device)
        member = torch.nn.functional.one_hot(self.kind.clamp(min=0), self.given.shape[1]).float()
        member[self.kind < 0] = 0.0
        for begin in range(0, rows.shape[0], _BLOCK_ROWS):
            block = slice(begin, begin + _BLOCK_ROWS)
            scores = (q[:, block] * scale) @ k.repeat_interleave(groups, 0).transpose(1, 2)
            future = columns[None, :] > rows[block, None]
            weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).mean(0) * alive[block, None]
            own = self.kind[rows[block], None] == self.kind[None, :]
            self.received[0] += weights.sum(0)
            self.received[1] += (weights * own).sum(0)
            self.given[block] += weights @ member
        self.layers_seen += 1

    def result(self) -> Probe:
        """Return what is known by now."""
        found = self.probe
        if self.layers_seen:
            # Attention that underflows must not turn a dropped token's minus infinity into not-a-number.
            received = (self.received[:, self.chunk] / self.layers_seen).clamp(min=1e-30).cpu()
            given = (self.given[self.at_chunk] / self.layers_seen).cpu()
            found = replace(found, received=received[0], received_within=received[1], given=given)
        return found if self.deviation is None else replace(found, deviation=self.deviation.cpu())

    def final(self) -> Probe:
        """Return what is known at the end: of tokens that were dropped on the way, a deviation of minus infinity."""
        if self.deviation is not None:
            self.deviation = torch.where(self.goes_on, self.deviation, -torch.inf)
        return self.result()


def early_probe(
    loaded: LoadedModel, request: Request, cache: FusedCache, view: EarlyView, probe: Probe, budget: int,
    score: Score | None,
) -> Probe:  # fmt: skip
    """Run the prompt through the first layers and return the probe with what they showed.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    cache : FusedCache
        Holds the prefix; its filler brings the chunks. Where KV are compared, it holds the fresh KV of every row
        that reached a layer afterwards, as the fused pass of a narrowing selector needs it; otherwise the stored.
    view : EarlyView
    probe : Probe
        The chunks.
    budget : int
        Tokens that are left after the last comparison.
    score : callable or None
        Says which rows go on; None where the view compares nothing.

    Returns
    -------
    Probe
    """
    rows = (request.kind != -2).nonzero()[:, 0].to(loaded.device)
    cache.rows, cache.visible = rows, request.num_tokens
    state = _EarlyPass(cache, request, view, probe, budget, score)
    ids = torch.tensor(request.ids, device=loaded.device)[rows]
    cache.watcher = state.watch
    try:
        forward_kv(loaded, ids[None], rows, cache, state)
    finally:
        cache.watcher = None
    if not view.deviation:
        cache.refill(view.layers)
    return state.final()
