"""What a request's report counts once its tokens are chosen, and what the store learns of the chunks it used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_llm.kv import PlacedChunk
from fused_kv_llm.report import FusionReport, PromptTrace, SelectionTrace
from fused_kv_llm.selectors import Selector, variant_selector

from .context import FusionContext
from .request import Request
from .variant_choice import report_variants

__all__ = ["count_tokens", "count_uses", "trace_of"]


def count_tokens(request: Request, selected: Tensor, report: FusionReport) -> None:
    """Count a prompt's tokens by what became of them.

    Parameters
    ----------
    request : Request
    selected : Tensor
        int64: positions of the chunks' tokens that are recomputed.
    report : FusionReport
        Receives the counts.
    """
    report.prompt_tokens = request.num_tokens
    report.prefix_tokens = request.prefix_tokens
    report.recomputed_tokens = int(selected.shape[0])
    report.reused_tokens = int(request.chunk_positions.shape[0]) - report.recomputed_tokens
    report.fresh_tokens = int(request.fresh_positions.shape[0])
    report.prefix_cache_tokens = request.prefix_tokens - request.header_tokens
    report.chunks_found = len(request.chunks) + request.num_covered


def count_uses(
    context: FusionContext, request: Request, selector: Selector, selected: Tensor, report: FusionReport
) -> None:
    """Count what was read of a request that reuses its chunks, and tell the store of their uses.

    Parameters
    ----------
    context : FusionContext
        Its ``weigh_use`` learns the overhead of each use.
    request : Request
    selector : Selector
    selected : Tensor
        As :func:`count_tokens` takes it.
    report : FusionReport
        Receives bytes by tier, and which variants were used.
    """
    report.bytes_loaded = _bytes_by_tier(request.chunks)
    if (choosing := variant_selector(selector)) is not None:
        report.variants = report_variants(request, choosing.alpha, selected)
    _weigh_uses(context, request, selected)


def trace_of(
    request: Request, selected: Tensor, num_layers: int, selection: SelectionTrace | None
) -> PromptTrace | None:
    """Return what became of every token of a prompt; None for a request without offsets in the text.

    Parameters
    ----------
    request : Request
    selected : Tensor
        As :func:`count_tokens` takes it.
    num_layers : int
    selection : SelectionTrace or None
        What the probe saw.
    """
    if request.offsets is None:
        return None
    recomputed = selected.cpu().numpy()
    return PromptTrace(request.text, request.offsets, request.kind.numpy(), recomputed, num_layers, selection)


def _weigh_uses(context: FusionContext, request: Request, selected: Tensor) -> None:
    """Tell the store the overhead of each chunk's use: a variant's CFO, otherwise the share recomputed."""
    weigh, chunks = context.weigh_use, request.chunks
    if weigh is None or not chunks:
        return
    kinds = request.kind[selected.cpu()]
    recomputed = torch.bincount(kinds[kinds >= 0], minlength=len(chunks)).tolist()
    for chunk, count in zip(chunks, recomputed, strict=True):
        tokens = max(1, chunk.segment.num_tokens)
        overhead = count / tokens if chunk.variant is None else chunk.variant.overhead
        weigh(str(chunk.segment.key), overhead, tokens)


def _bytes_by_tier(chunks: Sequence[PlacedChunk]) -> dict[str, int]:
    """Return the KV bytes by tier; a chunk that stands in the prompt twice is read once."""
    distinct = {chunk.stored.key: chunk.stored for chunk in chunks}.values()
    tiers = {stored.tier for stored in distinct}
    return {tier: sum(stored.nbytes for stored in distinct if stored.tier == tier) for tier in sorted(tiers)}
