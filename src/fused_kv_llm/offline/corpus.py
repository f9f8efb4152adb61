"""From texts to the chunks that have to be prefilled: what is new, what is there, whose neighbours have changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import chunk_key
from fused_kv_llm.errors import CorpusError, FusedKVWarning, PromptError
from fused_kv_llm.prompt import is_indexable
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import ChunkRow

from .batches import PendingChunk
from .embedder import Embedder
from .neighbours import GivenNeighbours, find_neighbours, given_neighbours

__all__ = ["CONTEXT_CHUNKS", "CorpusPlanner", "Similarity"]

_STACK_LEVEL = 5

CONTEXT_CHUNKS = 3
"""Neighbours that stand before a chunk at a time."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How neighbours are found.

    Parameters
    ----------
    count : int
        Neighbours of a chunk.
    embedder : Embedder
    vectors_path : Path or None
        Where vectors are remembered.
    """

    count: int
    embedder: Embedder
    vectors_path: Path | None


class CorpusPlanner:
    """Plans ingestions of one identity.

    Parameters
    ----------
    catalog : ChunkCatalog
        What is stored.
    identity : str
    encode : callable
        Text to stand-alone token ids.
    max_tokens : int
        Tokens that fit behind the header.
    similarity : Similarity or None
        None prefills every chunk right after the header.
    has_shift : callable
        Whether a stored chunk's context shift is stored too.
    """

    def __init__(
        self,
        catalog: ChunkCatalog,
        identity: str,
        encode: Callable[[str], list[int]],
        max_tokens: int,
        similarity: Similarity | None,
        has_shift: Callable[[str], bool],
    ) -> None:
        self._catalog = catalog
        self._identity = identity
        self._encode = encode
        self._max_tokens = max_tokens
        self._similarity = similarity
        self._has_shift = has_shift

    def plan(
        self,
        texts: Iterable[str],
        report: IngestReport,
        given: GivenNeighbours | None,
        refresh: bool,
        check_stale: bool,
    ) -> list[PendingChunk]:
        """Return the chunks to prefill.

        Parameters
        ----------
        texts : iterable of str
        report : IngestReport
            Gets the counts.
        given : mapping, callable or None
            A caller's own neighbours.
        refresh : bool
            Whether stored chunks whose neighbours have changed are prefilled again.
        check_stale : bool
            Whether to look for such chunks at all.

        Raises
        ------
        CorpusError
            If there are no texts, or something that is not text.
        """
        ids = self._token_ids(_distinct(texts, report), report)
        stored = self._catalog.rows_of(list(ids))
        new = [text for text in ids if text not in stored]
        report.chunks_present = len(stored)
        if self._similarity is None:
            return [PendingChunk(chunk_key(self._identity, ids[text]), text, ids[text]) for text in new]
        # A process that was killed between the two files of a chunk left the second one out.
        halves = {text: [row.key for row in found] for text, found in stored.items() if self._is_half(found)}
        report.chunks_present -= len(halves)
        rows: dict[str, list[str]] = {}
        if new or halves or check_stale:
            for row in self._catalog.all_rows():
                rows.setdefault(row.text, []).append(row.key)
                ids.setdefault(row.text, row.token_ids)
        old = [text for text in rows if text not in new and text not in halves] if check_stale else []
        contexts = self._contexts([*new, *halves, *old], ids, given)
        pending = [self._pending(text, ids, contexts[text], tuple(halves.get(text, ()))) for text in (*new, *halves)]
        stale = [
            self._pending(text, ids, contexts[text], tuple(rows[text]))
            for text in old
            if self._pending(text, ids, contexts[text]).key not in rows[text]
        ]
        if refresh:
            return [*pending, *stale]
        report.chunks_stale = len(stale)
        return pending

    def ids_of(self, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the stand-alone ids of texts."""
        return {text: tuple(self._encode(text)) for text in texts}

    def _pending(
        self,
        text: str,
        ids: Mapping[str, tuple[int, ...]],
        contexts: tuple[tuple[str, ...], ...],
        replaces: tuple[str, ...] = (),
    ) -> PendingChunk:
        # An empty sequence stands between contexts: the same chunks grouped otherwise are other contexts.
        before = [part for context in contexts for part in ((), *(ids[other] for other in context))][1:]
        key = chunk_key(self._identity, ids[text], before)
        return PendingChunk(key, text, ids[text], contexts, tuple(old for old in replaces if old != key))

    def _is_half(self, rows: Sequence[ChunkRow]) -> bool:
        """Whether a stored chunk had neighbours, and what they change is not stored."""
        return any(row.key != chunk_key(self._identity, row.token_ids) and not self._has_shift(row.key) for row in rows)

    def _contexts(
        self, texts: Sequence[str], ids: dict[str, tuple[int, ...]], given: GivenNeighbours | None
    ) -> dict[str, tuple[tuple[str, ...], ...]]:
        similarity = self._similarity
        if similarity is None:
            return dict.fromkeys(texts, ())
        if given is not None:
            found = given_neighbours(texts, given, similarity.count)
            for other in {other for others in found.values() for other in others if other not in ids}:
                ids[other] = tuple(self._encode(other))
        else:
            found = find_neighbours(texts, list(ids), similarity.count, similarity.embedder, similarity.vectors_path)
        return {text: self._fitting(text, found[text], ids) for text in texts}

    def _fitting(
        self, text: str, nearest: Sequence[str], ids: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[str, ...], ...]:
        """Return contexts of three neighbours each, as many of them as fit before the chunk, the nearest one first.

        That order measured closer to full prefill than the nearest one last.
        """
        contexts = []
        for begin in range(0, len(nearest), CONTEXT_CHUNKS):
            room, fitting = self._max_tokens - len(ids[text]), list[str]()
            for other in nearest[begin : begin + CONTEXT_CHUNKS]:
                room -= len(ids[other])
                if room <= 0:
                    break
                fitting.append(other)
            if fitting:
                contexts.append(tuple(fitting))
        return tuple(contexts)

    def _token_ids(self, texts: Sequence[str], report: IngestReport) -> dict[str, tuple[int, ...]]:
        ids: dict[str, tuple[int, ...]] = {}
        seen: set[tuple[int, ...]] = set()
        for text in texts:
            try:
                token_ids = tuple(self._encode(text))
            except PromptError as error:
                _skip(report, f"{error}", text)
                continue
            if len(token_ids) >= self._max_tokens:
                reason = (
                    f"its {len(token_ids)} tokens do not fit in the model's context, where {self._max_tokens} are left"
                )
                _skip(report, f"{reason}; split it", text)
            elif token_ids in seen:
                # Two texts can have the same token ids, for instance under a normalising tokenizer.
                report.chunks_duplicate += 1
            else:
                seen.add(token_ids)
                ids[text] = token_ids
        return ids


def _skip(report: IngestReport, reason: str, text: str) -> None:
    report.chunks_skipped += 1
    warnings.warn(f"A chunk is skipped: {reason}: {text[:60]!r}...", FusedKVWarning, stacklevel=_STACK_LEVEL)


def _distinct(texts: Iterable[str], report: IngestReport) -> list[str]:
    distinct: dict[str, None] = {}
    for text in texts:
        if not isinstance(text, str):
            raise CorpusError(f"A chunk is of type {type(text).__name__}, not text: pass strings or documents.")
        report.chunks_total += 1
        stripped = text.strip()
        if not is_indexable(stripped):
            report.chunks_skipped += 1
        elif stripped in distinct:
            report.chunks_duplicate += 1
        else:
            distinct[stripped] = None
    if report.chunks_total == 0:
        raise CorpusError("There are no chunks to ingest: the corpus is empty.")
    return list(distinct)
