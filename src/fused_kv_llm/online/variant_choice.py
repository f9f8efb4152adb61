"""Which KV of a chunk is used: its plain KV, or the variant that needs the least fixing (Cache-Craft section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fused_kv_llm.errors import VariantDamagedError
from fused_kv_llm.kv import PlacedChunk, VariantUse
from fused_kv_llm.prompt import Segment
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import VariantSelector, cache_context_impact, fix_overhead, plain_overhead
from fused_kv_llm.store import VariantRecord, Variants

from .request import Request

__all__ = ["VariantChoice", "describe_variants", "report_variants"]

_MIN_TOKENS = 8


class VariantChoice:
    """Chooses among the variants of an engine's chunks.

    Parameters
    ----------
    variants : Variants
    """

    def __init__(self, variants: Variants) -> None:
        self._variants = variants

    def take(
        self, plain: PlacedChunk, before: Sequence[str], selector: VariantSelector, report: FusionReport
    ) -> PlacedChunk:
        """Return the chunk with the KV of the least cache fix overhead; of equal ones, its plain KV.

        Parameters
        ----------
        plain : PlacedChunk
            Its KV is closed if a variant is used.
        before : sequence of str
            Keys of the chunks before it in the prompt, in order.
        selector : VariantSelector
        report : FusionReport
            Gets a warning for a variant that cannot be used.
        """
        key, before = plain.stored.key, list(dict.fromkeys(before))
        least = plain_overhead(not before, selector.alpha)
        chosen: tuple[VariantRecord, Segment] | None = None
        for record in self._records(key, report) if least > 0 else ():
            overhead, segment = overhead_of(record, before, selector.alpha), _segment_covered(plain, record)
            if overhead < least and segment is not None:
                least, chosen = overhead, (record, segment)
        if chosen is None:
            return plain
        record, segment = chosen
        try:
            stored = self._variants.open(plain.stored, record)
        except VariantDamagedError as error:
            self.discard(error, report)
            return plain
        plain.stored.close()
        self._variants.used(key, record.name, least, record.num_tokens)
        return PlacedChunk(segment, stored, VariantUse(record.name, least, record.token_inter))

    def discard(self, error: VariantDamagedError, report: FusionReport) -> None:
        """Delete a variant that turned out to be damaged; the next plan takes another, or the chunk's plain KV."""
        self._variants.discard(error.key, error.name)
        report.warnings.append(str(error))

    def _records(self, key: str, report: FusionReport) -> Iterator[VariantRecord]:
        for name in self._variants.names(key):
            try:
                yield self._variants.record(key, name)
            except VariantDamagedError as error:
                self.discard(error, report)


def overhead_of(record: VariantRecord, before: Sequence[str], alpha: float = 1.0) -> float:
    """Return a variant's cache fix overhead behind chunks of these keys (equations 6 to 12)."""
    impact = cache_context_impact(record.inter, record.intra, record.prefix_tokens.tolist(), record.num_tokens)
    return fix_overhead(impact, record.inter.double().mean(0).tolist(), record.prefix, before, alpha)


def describe_variants(request: Request, alpha: float) -> tuple[Tensor, Tensor]:
    """Return what was recorded of a request's chunks.

    Parameters
    ----------
    request : Request
    alpha : float
        What the overhead of plain KV is scaled with.

    Returns
    -------
    overhead : Tensor
        float64 ``[K]``, cache fix overhead by chunk.
    recorded : Tensor
        float32 ``[C]``, see :class:`.Probe`.
    """
    overhead, recorded = [], []
    for number, chunk in enumerate(request.chunks):
        is_first = number == 0 and request.has_first_chunk
        use = chunk.variant
        overhead.append(plain_overhead(is_first, alpha) if use is None else use.overhead)
        # The last token of a prompt is computed, whatever it is of.
        count = int((request.kind == number).sum())
        recorded.append(torch.zeros(count) if use is None else use.token_inter[chunk.inside][:count])
    return torch.tensor(overhead, dtype=torch.float64), torch.cat(recorded) if recorded else torch.zeros(0)


def report_variants(request: Request, alpha: float, selected: Tensor) -> list[dict[str, Any]]:
    """Return what is reported of a request's chunks, see :class:`.FusionReport`.

    Parameters
    ----------
    request : Request
    alpha : float
    selected : Tensor
        int64 positions of the chunk tokens that were recomputed.
    """
    recomputed = torch.bincount(request.kind[selected.cpu()], minlength=len(request.chunks)).tolist()
    return [
        {
            "chunk": str(chunk.segment.key)[:16],
            "variant": "" if chunk.variant is None else chunk.variant.name,
            "overhead": round(overhead, 4),
            "recomputed_tokens": count,
        }
        for chunk, overhead, count in zip(
            request.chunks, describe_variants(request, alpha)[0].tolist(), recomputed, strict=True
        )
    ]


def _segment_covered(chunk: PlacedChunk, record: VariantRecord) -> Segment | None:
    """Return the part of a chunk's segment that a variant has KV for; None if it is too short to be useful."""
    segment, (first, last) = chunk.segment, record.covered
    begin = max(segment.chunk_start, first)
    end = min(segment.chunk_start + segment.num_tokens, last)
    if end - begin < min(_MIN_TOKENS, segment.num_tokens):
        return None
    start = segment.start + begin - segment.chunk_start
    return replace(segment, start=start, stop=start + end - begin, chunk_start=begin)
