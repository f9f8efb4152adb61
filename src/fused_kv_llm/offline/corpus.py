"""From texts to the chunks of a corpus: what is new, what is stored already, what cannot be ingested."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import chunk_key, chunk_text
from fused_kv_llm.errors import CorpusError, FusedKVWarning, PromptError
from fused_kv_llm.prompt import is_indexable
from fused_kv_llm.report import IngestReport

from .batches import PendingChunk

__all__ = ["CorpusPlanner"]

_STACK_LEVEL = 5


class CorpusPlanner:
    """Turns texts into chunks of one identity.

    Parameters
    ----------
    catalog : ChunkCatalog
        What is stored.
    identity : str
    encode : callable
        Text to stand-alone token ids.
    max_tokens : int
        Tokens that fit behind the header.
    """

    def __init__(
        self, catalog: ChunkCatalog, identity: str, encode: Callable[[str], list[int]], max_tokens: int
    ) -> None:
        self.catalog = catalog
        self.identity = identity
        self.max_tokens = max_tokens
        self._encode = encode

    def plan(self, texts: Iterable[str], report: IngestReport) -> tuple[list[PendingChunk], list[PendingChunk]]:
        """Return all chunks that can be ingested, and those of them that are not stored yet.

        Parameters
        ----------
        texts : iterable of str
        report : IngestReport
            Gets the counts.

        Raises
        ------
        CorpusError
            If there are no texts, or something that is not text.
        """
        chunks = self._chunks(_distinct(texts, report), report)
        stored = self.catalog.rows_of([chunk.text for chunk in chunks])
        report.chunks_present = len(stored)
        return chunks, [chunk for chunk in chunks if chunk.text not in stored]

    def chunk(self, text: str) -> PendingChunk:
        """Return the chunk of a text."""
        token_ids = tuple(self._encode(text))
        return PendingChunk(chunk_key(self.identity, token_ids), text, token_ids)

    def _chunks(self, texts: Sequence[str], report: IngestReport) -> list[PendingChunk]:
        chunks: dict[str, PendingChunk] = {}
        for text in texts:
            try:
                chunk = self.chunk(text)
            except PromptError as error:
                _skip(report, f"{error}", text)
                continue
            tokens = len(chunk.token_ids)
            if tokens >= self.max_tokens:
                reason = f"its {tokens} tokens do not fit in the model's context, where {self.max_tokens} are left"
                _skip(report, f"{reason}; split it", text)
            elif chunk.key in chunks:
                # Two texts can have the same token ids, for instance under a normalising tokenizer.
                report.chunks_duplicate += 1
            else:
                chunks[chunk.key] = chunk
        return list(chunks.values())


def _skip(report: IngestReport, reason: str, text: str) -> None:
    report.chunks_skipped += 1
    warnings.warn(f"A chunk is skipped: {reason}: {text[:60]!r}...", FusedKVWarning, stacklevel=_STACK_LEVEL)


def _distinct(texts: Iterable[str], report: IngestReport) -> list[str]:
    distinct: dict[str, None] = {}
    for text in texts:
        if not isinstance(text, str):
            raise CorpusError(f"A chunk is of type {type(text).__name__}, not text: pass strings or documents.")
        report.chunks_total += 1
        stripped = chunk_text(text)
        if not is_indexable(stripped):
            report.chunks_skipped += 1
        elif stripped in distinct:
            report.chunks_duplicate += 1
        else:
            distinct[stripped] = None
    if report.chunks_total == 0:
        raise CorpusError("There are no chunks to ingest: the corpus is empty.")
    return list(distinct)
