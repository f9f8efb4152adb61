"""Fusion: from a planned request to a cache that is ready to generate, and the first logits.

load -> probe -> select -> recompute the selected and the fresh tokens by true position, in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.kv import PlacedChunk
from fused_kv_llm.model import ForwardPass, FusedCache, LoadedModel, forward_rows
from fused_kv_llm.report import FusionReport, PromptTrace
from fused_kv_llm.selectors import FirstLayersView, Selector, TransferringSelector, View, budget_tokens

from .context import FusionContext, Recipe
from .first_layers import FirstLayersPass
from .request import Request
from .request_kv import RequestKV
from .selection import describe_chunks, select, timed, view_of
from .transfer import TransferPass

__all__ = ["FusedPrompt", "fuse"]


@dataclass(slots=True)
class FusedPrompt:
    """A prompt whose KV is complete.

    Parameters
    ----------
    cache : FusedCache
        KV of the whole prompt, with room for the answer.
    logits : Tensor
        float32 ``[vocabulary]``: the next token's.
    selected : Tensor
        int64 positions of the chunk tokens that were recomputed, ascending.
    text : str
        The rendered prompt.
    """

    cache: FusedCache
    logits: Tensor
    selected: Tensor
    text: str

    def append(self, loaded: LoadedModel, token_ids: list[int]) -> Tensor:
        """Compute further tokens after the prompt.

        Parameters
        ----------
        loaded : LoadedModel
        token_ids : list of int
            The next tokens: one while decoding, several to score a given answer.

        Returns
        -------
        Tensor
            float32 ``[len(token_ids), vocabulary]``, the logits after each of them.
        """
        cache, count = self.cache, len(token_ids)
        positions = torch.arange(cache.length, cache.length + count, device=loaded.device)
        cache.length += count
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=loaded.device)
            return forward_rows(loaded, ids, positions, cache, ForwardPass(positions, cache.length))


def fuse(context: FusionContext, request: Request, recipe: Recipe, capacity: int, report: FusionReport) -> FusedPrompt:
    """Build a request's KV, recomputing only what the recipe's selector picks.

    Parameters
    ----------
    context : FusionContext
    request : Request
    recipe : Recipe
    capacity : int
        Prompt tokens plus room for the answer.
    report : FusionReport
        Gets token counts, bytes and the seconds of load, probe, select and fuse.

    Returns
    -------
    FusedPrompt

    Raises
    ------
    ChunkDamagedError
        If a chunk's file turns out to be damaged while it is read. Nothing has been returned then, and the request can
        be planned again without it.
    """
    num_chunk_tokens = int(request.chunk_positions.shape[0])
    budget = budget_tokens(recipe.ratio, num_chunk_tokens)
    reuses = budget < num_chunk_tokens
    view = view_of(recipe.selector, context.loaded, report) if budget and reuses else View()
    with torch.inference_mode():
        with timed(report, "load"):
            kv = RequestKV(context, request, capacity)
        with kv:
            if reuses:
                # An anchor probe needs nothing of the chunks themselves.
                by_anchors = isinstance(view, View) and view.anchors is not None
                with timed(report, "load"):
                    kv.feed(() if by_anchors else view.layers, shifts_at_once=not by_anchors)
            if isinstance(view, FirstLayersView):
                selected, logits = _select_on_the_way(context, request, kv, recipe, view, report)
            else:
                selected = select(context, request, kv, recipe, view, report)
                report.selection_bytes += kv.bytes_read
                with timed(report, "fuse"):
                    logits = _recompute(context.loaded, request, kv, selected, recipe.selector)
    kv.cache.length = request.num_tokens
    _count(report, request, selected)
    if reuses:
        report.bytes_loaded = _bytes_by_tier(request.chunks)
    if kv.shifts is not None and kv.shifts.bytes_loaded:
        report.sidecar_bytes_loaded["context_shift"] = kv.shifts.bytes_loaded
    return FusedPrompt(kv.cache, logits, selected, request.text)


def _recompute(loaded: LoadedModel, request: Request, kv: RequestKV, selected: Tensor, selector: Selector) -> Tensor:
    """Compute the selected and the fresh tokens; return the last one's logits."""
    strength = selector.transfer if isinstance(selector, TransferringSelector) else 0.0
    rows, geometry = request.rows(selected).to(loaded.device), loaded.geometry
    if strength and 0 < selected.shape[0] < request.chunk_positions.shape[0]:
        fused_pass: ForwardPass = TransferPass(request, selected, kv, geometry, strength)
    else:
        fused_pass = ForwardPass(rows, request.num_tokens, kv.fillers, geometry.num_layers - 1)
    return _run(loaded, request, kv, fused_pass)


def _select_on_the_way(
    context: FusionContext, request: Request, kv: RequestKV, recipe: Recipe, view: FirstLayersView,
    report: FusionReport,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select by the first layers of the fused pass itself; return the selected positions and the last logits."""
    probe = describe_chunks(request, recipe.seed)
    budget = budget_tokens(recipe.ratio, probe.positions.shape[0])
    fused_pass = FirstLayersPass(request, kv, view, recipe.selector, probe, budget)
    started_s = time.perf_counter()
    with timed(report, "fuse"):
        logits = _run(context.loaded, request, kv, fused_pass)
    report.seconds["probe"] = fused_pass.selected_at_s - started_s
    report.seconds["fuse"] -= report.seconds["probe"]
    report.selection_bytes += fused_pass.selection_bytes
    return fused_pass.selected, logits


def _run(loaded: LoadedModel, request: Request, kv: RequestKV, fused_pass: ForwardPass) -> Tensor:
    ids = torch.tensor(request.ids, device=loaded.device)[fused_pass.rows][None]
    return forward_rows(loaded, ids, fused_pass.rows, kv.cache, fused_pass)[0]


def _bytes_by_tier(chunks: Sequence[PlacedChunk]) -> dict[str, int]:
    """Return the KV bytes by tier; a chunk that stands in the prompt twice is read once."""
    distinct = {chunk.stored.key: chunk.stored for chunk in chunks}.values()
    tiers = {stored.tier for stored in distinct}
    return {tier: sum(stored.nbytes for stored in distinct if stored.tier == tier) for tier in sorted(tiers)}


def _count(report: FusionReport, request: Request, selected: Tensor) -> None:
    report.prompt_tokens = request.num_tokens
    report.prefix_tokens = request.prefix_tokens
    report.recomputed_tokens = int(selected.shape[0])
    report.reused_tokens = int(request.chunk_positions.shape[0]) - report.recomputed_tokens
    report.fresh_tokens = int(request.fresh_positions.shape[0])
    report.chunks_found = len(request.chunks)
    if request.offsets is not None:
        kind = request.kind.numpy()
        report.trace = PromptTrace(request.text, request.offsets, kind, selected.cpu().numpy())
