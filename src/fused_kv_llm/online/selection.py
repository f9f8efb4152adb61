"""From a planned request to the positions to recompute: what the selector asked to see, then its choice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fused_kv_llm.model import LoadedModel
from fused_kv_llm.report import FusionReport, SelectionTrace, stage_span
from fused_kv_llm.selectors import (
    FirstLayersView,
    Probe,
    ScoringSelector,
    Selector,
    View,
    anchors_of,
    budget_tokens,
    checked_selection,
    critical_layers,
    variant_selector,
)

from .anchors import ChunkAnchors, read_anchors
from .context import FusionContext, Recipe
from .divergence import uncovered_attention
from .numbers import numbers_in
from .probe import QuestionProbe
from .request import Request
from .request_kv import RequestKV
from .variant_choice import describe_variants

__all__ = ["Selection", "describe_chunks", "layer_scores", "timed", "view_of"]

_LEAST_GLOBAL = 2
"""The fewest layers that score a context, if a selector asks for several and the model has as many."""


@contextmanager
def timed(report: FusionReport, stage: str) -> Iterator[None]:
    """Add the seconds of what happens inside to a stage of the report."""
    start = time.perf_counter()
    try:
        with stage_span(stage):
            yield
    finally:
        report.spend(stage, start, time.perf_counter())


def view_of(
    selector: Selector, loaded: LoadedModel, shift_name: str | None, report: FusionReport
) -> View | FirstLayersView:
    """Return what the selector wants to see of this model; a model without a layer profile is reported.

    Parameters
    ----------
    selector : Selector
    loaded : LoadedModel
    shift_name : str or None
        The context shifts that the engine adds; None if it adds none.
    report : FusionReport
        Gets the warnings.
    """
    view = selector.view(loaded.geometry.num_layers)
    if isinstance(view, FirstLayersView):
        return view
    if view.plain_layers and not shift_name:
        view = replace(view, layers=view.plain_layers, groups=())
    if not loaded.geometry.attends_cache and (view.layers or view.critical):
        # Only the layers themselves turn what is cached into keys, so the question has to see all of it.
        if view.anchors is not None:
            report.warnings.append(
                f"{loaded.model_id!r} keeps no keys that anchors could be made of: the rule asked for was "
                f"{view.anchors.rule} at {view.anchors.ratio:g}, and the question sees the whole context instead."
            )
        view = replace(view, full_context=True, anchors=None, profiled=False)
    if view.profiled:
        view = replace(view, anchors=anchors_of(loaded.fingerprint) or view.anchors)
    if view.anchors is not None and view.anchors.shifted:
        view = replace(view, anchor_shift=shift_name)
    if not view.critical:
        groups = {global_layers(of, loaded.geometry.global_layers): None for of in view.groups or (view.layers,)}
        layers = tuple(sorted({layer for group in groups for layer in group}))
        return replace(view, layers=layers, groups=tuple(groups) if len(groups) > 1 else ())
    critical, profiled = critical_layers(loaded.fingerprint, loaded.geometry.num_layers)
    layers = global_layers(critical, loaded.geometry.global_layers)
    if not profiled:
        report.warnings.append(
            f"The critical layers of {loaded.model_id!r} were not profiled: layers {layers} stand in. "
            "fused-kv calibrate layers finds them."
        )
    return replace(view, layers=layers)


def global_layers(layers: Sequence[int], with_full_attention: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that can score a whole context: a layer with a window sees little of it.

    Parameters
    ----------
    layers : sequence of int
        What a selector wants to look at, ascending.
    with_full_attention : sequence of int
        The model's layers without a window.

    Returns
    -------
    tuple of int
        Those of `layers` without a window, ascending. A selector that asks for one layer gets one at least, and one
        that asks for several gets two: what is lacking are the layers without a window that are nearest to the first of
        `layers`, the earlier of two as near, since later ones cost more. Measured in docs/experiments.md, "Layers that
        choose in Gemma". Where all layers have a window, every layer is as good, and `layers` come back as they are.
    """
    if not layers or not with_full_attention:
        return tuple(layers)
    found = [layer for layer in layers if layer in with_full_attention]
    others = sorted(set(with_full_attention).difference(found), key=lambda layer: (abs(layer - layers[0]), layer))
    lacking = max(0, min(_LEAST_GLOBAL, len(layers)) - len(found))
    return tuple(sorted(found + others[:lacking]))


class Selection:
    """The choice of the chunk tokens that are recomputed.

    Parameters
    ----------
    context : FusionContext
    request : Request
    kv : RequestKV
        Its cache holds the prefix; its fillers bring the chunks.
    recipe : Recipe
    view : View
        What the recipe's selector wants to see.
    report : FusionReport
        Gets the seconds of probe and select, and what the anchors cost.

    Attributes
    ----------
    trace : SelectionTrace or None
        What the selector went by, once it has chosen, if the recipe asks for it.
    uncovered : float or None
        The question's attention to what it has not chosen; None where it does not look at that.
    known : Probe or None
        What it went by, once it has chosen; None where there was nothing to decide.
    """

    def __init__(
        self, context: FusionContext, request: Request, kv: RequestKV, recipe: Recipe, view: View, report: FusionReport
    ) -> None:
        self._context, self._request, self._kv = context, request, kv
        self._recipe, self._view, self._report = recipe, view, report
        self._probe: QuestionProbe | None = None
        self.trace: SelectionTrace | None = None
        self.uncovered: float | None = None
        self.known: Probe | None = None

    def positions(self, pause_at_s: float = float("inf")) -> Tensor:
        """Return the chunk positions to recompute, int64, ascending.

        Raises
        ------
        PausedError
            If the probe was left when its time was over; called again, it goes on.
        """
        request, recipe, report = self._request, self._recipe, self._report
        chunk = request.chunk_positions
        budget = budget_tokens(recipe.ratio, chunk.shape[0])
        # Ratio 0 and ratio 1 leave nothing to decide, whatever the selector.
        if budget in (0, chunk.shape[0]):
            return chunk[:budget]
        known, by_layer = describe_chunks(request, recipe), None
        if self._view.layers:
            with timed(report, "probe"):
                by_layer = self._question_probe().scores(pause_at_s)
                known = replace(known, scores=self._view.averaged(by_layer))
        with timed(report, "select"):
            if recipe.trace_scores and by_layer is not None:
                self.trace = _traced(recipe.selector, self._view, by_layer, known)
            selected, self.known = checked_selection(recipe.selector, known, budget), known
            if by_layer is not None:
                self.uncovered = uncovered_attention(by_layer.mean(0), chunk, selected)
            return selected

    def _question_probe(self) -> QuestionProbe:
        if self._probe is None:
            anchors = _read_anchors(self._view, self._context, self._request)
            self._probe = QuestionProbe(self._context.loaded, self._request, self._kv, self._view, anchors)
            if anchors is not None:
                _count_anchors(self._report, anchors, self._view)
        return self._probe


def _traced(selector: Selector, view: View, by_layer: Tensor, known: Probe) -> SelectionTrace:
    ranked_by = selector.score(known) if isinstance(selector, ScoringSelector) else view.averaged(by_layer)
    return SelectionTrace(view.layers, by_layer.float().cpu().numpy(), ranked_by.float().cpu().numpy())


def describe_chunks(request: Request, recipe: Recipe) -> Probe:
    """Return what is known of a request's chunk tokens before anything was looked at."""
    selector = variant_selector(recipe.selector)
    overhead, recorded = (None, None) if selector is None else describe_variants(request, selector.alpha)
    positions = request.chunk_positions
    chunk_index = request.kind[positions]
    starts = torch.tensor([chunk.segment.start for chunk in request.chunks])
    numbers = None if request.offsets is None else numbers_in(request.text, request.offsets)[positions]
    if numbers is not None:
        # A number ends where its chunk does.
        numbers = torch.where(numbers < 0, -1, numbers * len(request.chunks) + chunk_index)
    return Probe(positions, chunk_index, positions - starts[chunk_index], seed=recipe.seed, overhead=overhead,
                 recorded=recorded, numbers=numbers, has_first_chunk=request.has_first_chunk)  # fmt: skip


def _read_anchors(view: View, context: FusionContext, request: Request) -> ChunkAnchors | None:
    if view.anchors is None:
        return None
    return read_anchors(request, view, view.anchors, context.sidecars, context.loaded.geometry)


def _count_anchors(report: FusionReport, anchors: ChunkAnchors, view: View) -> None:
    report.selection_bytes += anchors.bytes_read
    if anchors.bytes_of_sidecars:
        report.sidecar_bytes_loaded["anchors"] = anchors.bytes_of_sidecars
    if anchors.num_missing and view.anchors is not None:
        asked = f"{view.anchors.rule} at {view.anchors.ratio:g}"
        stored = f"{asked}, storage {view.anchors.storage}, layers {', '.join(map(str, view.layers))}"
        used = "" if view.anchors.rule == "sink" else f" The rule asked for was {asked}, the one used for them is sink."
        report.warnings.append(
            f"{anchors.num_missing} chunks have no stored anchors ({stored}): their first tokens stand in, read from "
            f"their KV.{used} FusedKVEngine.build_anchors(texts, selector=...) stores them."
        )
    if anchors.num_unshifted:
        report.warnings.append(
            f"{anchors.num_unshifted} chunks have a context shift, but no stored anchors with it: the question sees "
            "them without. FusedKVEngine.build_anchors(texts, selector=...) stores them."
        )


def layer_scores(context: FusionContext, request: Request, view: View) -> Tensor:
    """Score the chunk tokens layer by layer without recomputing anything, for profiling.

    Parameters
    ----------
    context : FusionContext
    request : Request
    view : View
        With anchors they come from sidecars, or from the chunks themselves where there are none; without, the chunks'
        KV is read.

    Returns
    -------
    Tensor
        float32 ``[len(view.layers), C]``, aligned with ``request.chunk_positions``.
    """
    with torch.inference_mode(), RequestKV(context, request, request.num_tokens) as kv:
        try:
            if view.anchors is None:
                kv.feed(view.read_first, shifts_at_once=True)
            return QuestionProbe(context.loaded, request, kv, view, _read_anchors(view, context, request)).scores()
        finally:
            kv.cache.release()
