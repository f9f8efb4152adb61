"""Selection by the first layers: all rows of a prompt begin the fused pass, and those that are not selected leave it.

CacheBlend, KVShare and Prefill-H2O decide by what the first layers show; Cache-Craft drops rows of chunks that the
question turns out not to see. A row that is dropped at a layer has fresh KV up to that layer, and its stored KV from
the next one on.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, kv_deviation
from fused_kv_llm.model import AttentionRule, NarrowingPass, attention_weights
from fused_kv_llm.selectors import (
    FirstLayersView,
    Probe,
    ScoringSelector,
    Selector,
    checked_selection,
    focused_chunks,
    is_settled,
)

from .request import Request
from .request_kv import RequestKV

__all__ = ["FirstLayersPass"]

_BLOCK_ROWS = 128


class FirstLayersPass(NarrowingPass):
    """A fused pass that selects on its way.

    Parameters
    ----------
    request : Request
    kv : RequestKV
    view : FirstLayersView
        The selector's.
    selector : Selector
    probe : Probe
        The chunks.
    budget : int
        Tokens that may be recomputed.

    Attributes
    ----------
    looks : bool
        Whether the selector looks at layers first; otherwise only the rows that it has selected begin.
    selected : Tensor
        int64 positions of the chunk tokens that were selected, ascending.
    begun_at_s, selected_at_s : float
        ``time.perf_counter()`` of the pass's begin and of the selection.
    selection_bytes : int
        Bytes of stored KV that had been read by then.
    """

    def __init__(
        self, request: Request, kv: RequestKV, view: FirstLayersView, selector: Selector, probe: Probe, budget: int
    ) -> None:
        device = kv.cache.keys.device
        self.looks = bool(view.layers)
        self.selected = probe.positions if self.looks else checked_selection(selector, probe, budget)
        rows = request.rows(self.selected).to(device)
        super().__init__(rows, request.num_tokens, kv.fillers, kv.cache.geometry.last_layer)
        self.selected_at_s = 0.0
        self.selection_bytes = 0
        self._kv, self._view, self._selector, self._budget = kv, view, selector, budget
        self._probe = probe
        self._kind = request.kind.to(device)
        self._sums = _AttentionSums(self._kind, len(request.chunks))
        self._focus = _Focus(request, view.focus_window) if view.focus_window else None

    def begin(self) -> None:
        """Expect the first layer."""
        super().begin()
        self.begun_at_s = time.perf_counter()

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Compare a layer's fresh rows with the stored ones, and drop those that score least."""
        if layer_idx not in self._view.deviation or not isinstance(self._selector, ScoringSelector):
            return
        cache, chunk = self._kv.cache, self.selected.to(self.rows.device)
        stored = cache.keys[layer_idx, 0], cache.values[layer_idx, 0]
        fresh = cache.padded(keys[0], values[0])
        gaps = kv_deviation(*fresh, *stored, torch.searchsorted(self.rows, chunk), chunk).cpu()
        deviation = torch.full(self._probe.positions.shape, -torch.inf)
        deviation[torch.searchsorted(self._probe.positions, self.selected)] = gaps
        self._probe = replace(self._seen_so_far(), deviation=deviation)
        keep = self._view.keep[self._view.deviation.index(layer_idx)]
        count = min(self.selected.shape[0], math.ceil(keep * self._budget))
        best = torch.sort(self._selector.score(self._probe), descending=True, stable=True).indices[:count]
        self._go_on_with(self._probe.positions[best].sort().values)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output; see what the view asks for, and select after the last layer of it."""
        last = len(self._view.layers) - 1
        if layer_idx in self._view.attention:
            self._sums.add(self.plans(rule.mask)[0], q[0], k[0], rule)
        if self._focus is not None and layer_idx < len(self._kv.cache.layers) and layer_idx != self.final_layer:
            self._focus.add(self.plans(rule.mask)[0], q[0], k[0], rule)
        if layer_idx == last:
            self.selected_at_s, self.selection_bytes = time.perf_counter(), self._kv.bytes_read
            self.selected = checked_selection(self._selector, self._seen_so_far(), self._budget)
            self._go_on_with(self.selected)
        elif layer_idx > last and self._focus is not None and self._focus.is_settled():
            kind = self._kind[self.rows]
            self.keep(((kind < 0) | torch.isin(kind, self._focus.chunks.to(kind.device))).nonzero()[:, 0])
            self._focus = None
        return super().attend(layer_idx, q, k, v, rule)

    def _go_on_with(self, chunk_tokens: Tensor) -> None:
        """Drop the chunk tokens that are not listed."""
        self.selected = chunk_tokens
        stays = (self._kind[self.rows] < 0) | torch.isin(self.rows, chunk_tokens.to(self.rows.device))
        self.keep(stays.nonzero()[:, 0])

    def _seen_so_far(self) -> Probe:
        if not self._sums.layers:
            return self._probe
        received, within, given = self._sums.of(self._probe.positions)
        return replace(self._probe, received=received, received_within=within, given=given)


class _AttentionSums:
    """Attention that a prompt's tokens receive and give, summed over rows and averaged over heads and layers."""

    def __init__(self, kind: Tensor, num_chunks: int) -> None:
        self.layers = 0
        self._kind = kind
        self._member = torch.nn.functional.one_hot(kind.clamp(min=0), num_chunks).float() * (kind >= 0)[:, None]
        self._received = torch.zeros(2, kind.shape[0], device=kind.device)
        self._given = torch.zeros(kind.shape[0], num_chunks, device=kind.device)

    def add(self, plan: RowPlan, q: Tensor, k: Tensor, rule: AttentionRule) -> None:
        """Add a layer, given queries ``[Hq, R, D]`` of the plan's rows and keys ``[Hkv, N, D]``."""
        for begin in range(0, plan.num_rows, _BLOCK_ROWS):
            span = slice(begin, min(begin + _BLOCK_ROWS, plan.num_rows))
            block = plan.q_positions[span]
            weights = attention_weights(q[:, span], k, plan, rule, span).mean(0)
            self._received[0] += weights.sum(0)
            self._received[1] += (weights * (self._kind[block, None] == self._kind[None, :])).sum(0)
            self._given[block] += weights @ self._member
        self.layers += 1

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what tokens receive, what they receive from their own chunk, and what they give to each chunk."""
        at = positions.to(self._kind.device)
        # Attention that underflows must not turn a dropped token's minus infinity into not-a-number.
        received = (self._received[:, at] / self.layers).clamp(min=1e-30).cpu()
        return received[0], received[1], (self._given[at] / self.layers).cpu()


class _Focus:
    """The chunks that the question looks at, layer by layer (Cache-Craft section 3.2.2 and algorithm 1)."""

    def __init__(self, request: Request, window: int) -> None:
        self._question = request.question_rows()[1]
        self._window = window
        self._inside = request.chunk_positions
        self._chunk = request.kind[self._inside]
        self._attention = torch.zeros(len(request.chunks))
        self._history: list[frozenset[int]] = []

    def add(self, plan: RowPlan, q: Tensor, k: Tensor, rule: AttentionRule) -> None:
        """Add a layer, given queries ``[Hq, R, D]`` of the plan's rows and keys ``[Hkv, N, D]``."""
        asked = slice(plan.num_rows - self._question, plan.num_rows)
        first = None if plan.first_keys is None else plan.first_keys[asked]
        scores = rule.scores(q[:, asked], k, plan.q_positions[asked], first)
        self._attention.index_add_(0, self._chunk, scores.float().cpu()[self._inside])
        self._history.append(focused_chunks(self._attention))

    def is_settled(self) -> bool:
        """Whether the focus has been the same for as many layers as the window."""
        return is_settled(self._history, self._window)

    @property
    def chunks(self) -> Tensor:
        """int64: the chunks in focus, ascending."""
        return torch.tensor(sorted(self._history[-1]), dtype=torch.int64)
