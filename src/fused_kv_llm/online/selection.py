"""From a planned request to the positions to recompute: what the selector asked to see, then its choice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_llm.model import BufferPool, FusedCache, LoadedModel, PrefixKV
from fused_kv_llm.report import FusionReport, stage_span
from fused_kv_llm.selectors import (
    EarlyView,
    NarrowingSelector,
    Probe,
    Selector,
    View,
    checked_selection,
    critical_layers,
)
from fused_kv_llm.store import Sidecars

from .anchors import read_anchors
from .early import early_probe
from .probe import probe_scores
from .request import Request

__all__ = ["layer_scores", "select", "start_cache", "timed", "view_of"]


@contextmanager
def timed(report: FusionReport, stage: str) -> Iterator[None]:
    """Add the seconds of what happens inside to a stage of the report."""
    start = time.perf_counter()
    with stage_span(stage):
        yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start


def start_cache(loaded: LoadedModel, request: Request, prefix: PrefixKV, capacity: int, pool: BufferPool) -> FusedCache:
    """Return a cache that holds the header's KV and nothing else."""
    cache = FusedCache(loaded.geometry, capacity, pool)
    count = request.prefix_tokens
    cache.keys[:, 0, :, :count] = prefix.keys[:, :, :count]
    cache.values[:, 0, :, :count] = prefix.values[:, :, :count]
    return cache


def view_of(selector: Selector, loaded: LoadedModel, report: FusionReport) -> View | EarlyView:
    """Return what the selector wants to see of this model; a model without a layer profile is reported."""
    view = selector.view(loaded.geometry.num_layers)
    if isinstance(view, EarlyView) or not view.critical:
        return view
    layers, profiled = critical_layers(loaded.fingerprint, loaded.geometry.num_layers)
    if not profiled:
        report.warnings.append(
            f"The critical layers of {loaded.model_id!r} were not profiled: layers {layers} stand in. "
            "fused-kv calibrate layers finds them."
        )
    return replace(view, layers=layers)


def select(
    loaded: LoadedModel,
    request: Request,
    cache: FusedCache,
    selector: Selector,
    view: View | EarlyView,
    budget: int,
    seed: int,
    report: FusionReport,
    sides: Sidecars,
) -> Tensor:
    """Return the chunk positions to recompute, int64, ascending.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    cache : FusedCache
        Holds the header; its filler brings the chunks.
    selector : Selector
    view : View or EarlyView
        What it wants to see.
    budget : int
        Tokens it may pick.
    seed : int
        For selectors that draw.
    report : FusionReport
        Gets the seconds of probe and select, and what the anchors cost.
    sides : Sidecars
        Where anchors are.
    """
    chunk = request.chunk_positions
    # Ratio 0 and ratio 1 leave nothing to decide, whatever the selector.
    if budget in (0, chunk.shape[0]):
        return chunk[:budget]
    probe = _describe_chunks(request, seed)
    if view.layers:
        with timed(report, "probe"):
            if isinstance(view, EarlyView):
                score = selector.score if isinstance(selector, NarrowingSelector) else None
                probe = early_probe(loaded, request, cache, view, probe, budget, score)
            else:
                probe = replace(probe, scores=_question_scores(loaded, request, cache, view, sides, report).mean(0))
    with timed(report, "select"):
        return checked_selection(selector, probe, budget)


def _describe_chunks(request: Request, seed: int) -> Probe:
    positions = request.chunk_positions
    chunk_index = request.kind[positions]
    starts = torch.tensor([p.segment.start for p in request.placements])
    return Probe(positions, chunk_index, positions - starts[chunk_index], seed=seed)


def _question_scores(
    loaded: LoadedModel, request: Request, cache: FusedCache, view: View, sides: Sidecars, report: FusionReport
) -> Tensor:
    if view.anchors is None:
        return probe_scores(loaded, request, cache, view)
    anchors = read_anchors(request, view.anchors, view.layers, sides, loaded.geometry, report)
    return probe_scores(loaded, request, cache, view, anchors)


def layer_scores(
    loaded: LoadedModel, request: Request, prefix: PrefixKV, view: View, pool: BufferPool, sides: Sidecars
) -> Tensor:
    """Score the chunk tokens layer by layer without recomputing anything, for profiling.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    prefix : PrefixKV
    view : View
        With anchors: the chunks' KV come from sidecars, or from the chunks themselves where there are none.
    pool : BufferPool
    sides : Sidecars

    Returns
    -------
    Tensor
        float32 ``[len(view.layers), C]``, aligned with ``request.chunk_positions``.
    """
    with torch.inference_mode():
        cache = start_cache(loaded, request, prefix, request.num_tokens, pool)
        try:
            return _question_scores(loaded, request, cache, view, sides, FusionReport())
        finally:
            cache.release()
