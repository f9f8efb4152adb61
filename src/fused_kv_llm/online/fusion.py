"""Fusion: from a planned request to a cache that is ready to generate, and the first logits.

load -> probe -> select -> recompute the selected and the fresh tokens by true position, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan
from fused_kv_llm.model import (
    BufferPool,
    FusedCache,
    LoadedModel,
    PrefixKV,
    RowPass,
    forward_rows,
)
from fused_kv_llm.report import FusionReport, PromptTrace
from fused_kv_llm.selectors import EarlyView, Selector, TransferringSelector, View, budget_tokens
from fused_kv_llm.store import Sidecars

from .focus import FocusPass
from .loading import ChunkLoader
from .request import Placement, Request
from .selection import select, start_cache, timed, view_of
from .shifting import ContextShift
from .transfer import DeviationTransfer

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
        cache.rows, cache.visible = positions, cache.length
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=loaded.device)
            state = RowPass(RowPlan(positions, cache.length))
            return forward_rows(loaded, ids, positions, cache, state, keep=0)


def fuse(
    loaded: LoadedModel,
    request: Request,
    prefix: PrefixKV,
    selector: Selector,
    ratio: float,
    executor: Executor | None,
    pool: BufferPool,
    report: FusionReport,
    *,
    capacity: int,
    sides: Sidecars,
    seed: int = 0,
) -> FusedPrompt:
    """Build a request's KV, recomputing only what the selector picks.

    Parameters
    ----------
    loaded : LoadedModel
    request : Request
    prefix : PrefixKV
        KV of the prompt's header.
    selector : Selector
    ratio : float
        Recomputed chunk tokens over reusable chunk tokens, in [0, 1].
    executor : Executor or None
        Threads that read from disk; without them, the system is asked to read ahead.
    pool : BufferPool
        Where the cache's memory comes from.
    report : FusionReport
        Gets token counts, bytes and the seconds of load, probe, select and fuse.
    capacity : int
        Prompt tokens plus room for the answer.
    sides : Sidecars
        Where anchors are.
    seed : int
        For selectors that draw.

    Returns
    -------
    FusedPrompt

    Raises
    ------
    ChunkDamagedError
        If a chunk's file turns out to be damaged while it is read; nothing has been returned then, and the
        request can be planned again without it.
    """
    chunk = request.chunk_positions
    budget = budget_tokens(ratio, int(chunk.shape[0]))
    everything = budget == chunk.shape[0]
    view = View() if budget == 0 or everything else view_of(selector, loaded, report)
    placements = [] if everything else request.placements
    with torch.inference_mode():
        with timed(report, "load"):
            cache = start_cache(loaded, request, prefix, capacity, pool)
        try:
            with _loading(loaded, request, placements, cache, executor, view, report, sides) as (loader, shift):
                selected = select(loaded, request, cache, selector, view, budget, seed, report, sides)
                report.selection_bytes += loader.bytes_filled + shift.bytes_read
                with timed(report, "fuse"):
                    window = view.focus_window if isinstance(view, EarlyView) else 0
                    strength = selector.transfer if isinstance(selector, TransferringSelector) else 0.0
                    logits = _recompute(loaded, request, cache, selected, window, strength, shift)
        except BaseException:
            cache.release()
            raise
    _count(report, request, selected)
    report.bytes_loaded = _bytes_by_tier(placements)
    if shift.bytes_loaded:
        report.sidecar_bytes_loaded["context_shift"] = shift.bytes_loaded
    return FusedPrompt(cache, logits, selected, request.text)


@contextmanager
def _loading(
    loaded: LoadedModel,
    request: Request,
    placements: list[Placement],
    cache: FusedCache,
    executor: Executor | None,
    view: View | EarlyView,
    report: FusionReport,
    sides: Sidecars,
) -> Iterator[tuple[ChunkLoader, ContextShift]]:
    # Of the chunks themselves an anchor probe needs nothing.
    by_anchors = isinstance(view, View) and view.anchors is not None
    first = () if by_anchors else view.layers
    with ExitStack() as stack:
        with timed(report, "load"):
            shift = ContextShift(placements, request.prefix_tokens, cache, loaded.geometry, sides, executor, first)
            stack.callback(shift.close)
            if not by_anchors:
                shift.start()
            loader = ChunkLoader(placements, loaded.geometry, cache, executor, first)
            stack.callback(loader.cancel)

        def fill(layer_idx: int) -> None:
            loader(layer_idx)
            shift(layer_idx)

        cache.filler = fill
        try:
            yield loader, shift
        finally:
            cache.filler = None


def _recompute(
    loaded: LoadedModel,
    request: Request,
    cache: FusedCache,
    selected: Tensor,
    focus_window: int,
    strength: float,
    shift: ContextShift,
) -> Tensor:
    count, rows = request.num_tokens, request.rows(selected)
    cache.rows, cache.visible, cache.length = rows.to(loaded.device), count, count
    ids = torch.tensor(request.ids)[rows][None].to(loaded.device)
    plan = RowPlan(cache.rows, count)
    state: RowPass = RowPass(plan, loaded.geometry.num_layers - 1)
    if focus_window and request.placements:
        state = focus = FocusPass(plan, loaded.geometry.num_layers - 1, cache, request, focus_window)
        cache.watcher = focus.watch
    elif strength and 0 < selected.shape[0] < request.chunk_positions.shape[0]:
        cache.watcher = DeviationTransfer(request, selected, cache, loaded.geometry, strength, shift).watch
    try:
        return forward_rows(loaded, ids, cache.rows, cache, state, keep=1)[0]
    finally:
        cache.watcher = None


def _bytes_by_tier(placements: list[Placement]) -> dict[str, int]:
    """Return the KV bytes by tier; a chunk that stands in the prompt twice is read once."""
    distinct = {placement.stored.key: placement.stored for placement in placements}.values()
    tiers = {stored.tier for stored in distinct}
    return {tier: sum(stored.nbytes for stored in distinct if stored.tier == tier) for tier in sorted(tiers)}


def _count(report: FusionReport, request: Request, selected: Tensor) -> None:
    report.prompt_tokens = request.num_tokens
    report.prefix_tokens = request.prefix_tokens
    report.recomputed_tokens = int(selected.shape[0])
    report.reused_tokens = int(request.chunk_positions.shape[0]) - report.recomputed_tokens
    report.fresh_tokens = int(request.fresh_positions.shape[0])
    report.chunks_found = len(request.placements)
    if request.offsets is not None:
        kind = request.kind.numpy()
        report.trace = PromptTrace(request.text, request.offsets, kind, selected.cpu().numpy())
