"""The chunks an engine has KV of: computing it, keeping it in step with a corpus, loading it ahead of need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.context_shift import CONTEXT_SHIFT
from fused_kv_llm.offline import (
    AnchorBuilder,
    BackgroundIngestor,
    CorpusPlanner,
    GivenNeighbours,
    Ingestor,
    Similarity,
    as_embedder,
)
from fused_kv_llm.report import IngestReport
from fused_kv_llm.selectors import View, side_name

from .parts import EngineParts

__all__ = ["EngineCorpus", "similarity_of"]


def similarity_of(config: EngineConfig) -> Similarity | None:
    """Return how the neighbours of chunks are found; None where they are not used.

    Raises
    ------
    ConfigError
        If the embedder has no method that embeds.
    """
    if config.preprocessing == "none":
        return None
    return Similarity(config.num_neighbours, as_embedder(config.embedder), Path(config.kv_dir) / "vectors.sqlite")


class EngineCorpus:
    """What is done with chunks outside of requests; ``FusedKVEngine`` describes its public methods.

    Parameters
    ----------
    parts : EngineParts
    similarity : Similarity or None
        How the neighbours of chunks are found; None prefills every chunk by itself.
    store_misses : bool
        Whether chunks that prompts contain and the store lacks are ingested in the background.
    """

    def __init__(self, parts: EngineParts, similarity: Similarity | None, *, store_misses: bool) -> None:
        loaded, store, encode = parts.loaded, parts.store, parts.renderer.encode_chunk
        self._store, self._catalog = store, parts.catalog
        room = parts.context_length - len(parts.prefix.token_ids)
        planner = CorpusPlanner(
            parts.catalog, parts.identity, encode, room, similarity, lambda key: store.sidecars.has(key, CONTEXT_SHIFT)
        )
        self._ingestor = Ingestor(loaded, store, parts.identity, parts.prefix, planner, parts.model_lock)
        self._anchors = AnchorBuilder(loaded, store, parts.prefix, encode, parts.model_lock)
        self._background = BackgroundIngestor(self._ingestor) if store_misses else None

    def build(
        self, texts: Iterable[str], neighbours: GivenNeighbours | None, *, refresh: bool, progress: bool
    ) -> IngestReport:
        """Prefill every chunk once and store its KV."""
        return self._ingestor.run(chunk_texts(texts), neighbours=neighbours, refresh=refresh, progress=progress)

    def build_anchors(self, texts: Iterable[str], view: object, *, progress: bool) -> int:
        """Store the anchors that a view asks for, of chunks that are stored; return how many are new."""
        if not isinstance(view, View) or view.anchors is None:
            return 0
        keys = self.keys_of(chunk_texts(texts))
        return self._anchors.run((key for key in keys if key), view.anchors, view.layers, progress=progress)

    def delete(self, texts: Iterable[str]) -> int:
        """Delete the stored KV of chunks, and return how many were stored."""
        rows = self._catalog.rows_of(chunk_texts(texts))
        self._store.delete({row.key for found in rows.values() for row in found})
        return len(rows)

    def prefetch(self, texts: Iterable[str], view: object) -> list[str | None]:
        """Start loading what a request with this view reads of chunks; expect those without KV in the next prompts."""
        retrieved = chunk_texts(texts)
        keys = self.keys_of(retrieved)
        sidecars = [CONTEXT_SHIFT]
        if isinstance(view, View) and view.anchors is not None:
            sidecars.append(side_name(view.anchors, view.layers))
        self._store.prefetch([key for key in keys if key is not None], sidecars)
        self.expect(text for text, key in zip(retrieved, keys, strict=True) if key is None)
        return keys

    def keys_of(self, texts: Sequence[str]) -> list[str | None]:
        """Return the keys of chunks, given by their canonical text; None where no KV is stored."""
        rows = self._catalog.rows_of(texts)
        return [rows[text][-1].key if text in rows else None for text in texts]

    def stored_texts(self) -> list[str]:
        """Return the text of every chunk whose KV is stored, in the order of ingestion."""
        return list(dict.fromkeys(row.text for row in self._catalog.all_rows()))

    # -- in the background -----------------------------------------------------------------------------------

    def expect(self, texts: Iterable[str]) -> None:
        """Remember chunks that have no KV, in case that the next prompts contain them."""
        if self._background is not None:
            self._background.expect(texts)

    def ingest_expected(self, prompt_text: str) -> None:
        """Ingest the remembered chunks that a prompt contains."""
        if self._background is not None:
            self._background.ingest_expected(prompt_text)

    def wait(self) -> None:
        """Return when no background ingestion is under way."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Finish the chunk under way and stop."""
        if self._background is not None:
            self._background.close()
