"""The chunks an engine has KV of: computing it, keeping it in step with a corpus, loading it ahead of need."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.config import EngineConfig, parse_bytes
from fused_kv_llm.kv import PrefixTree
from fused_kv_llm.offline import (
    AlternativePath,
    AnchorBuilder,
    BackgroundWork,
    CorpusPlanner,
    FixedPieces,
    GivenNeighbours,
    Ingestor,
    PrefillCost,
    Preprocess,
    Preprocessor,
    PromptChunks,
    Similarity,
    VariantBuilder,
    as_embedder,
)
from fused_kv_llm.prompt import Segment
from fused_kv_llm.report import IngestReport
from fused_kv_llm.selectors import View, sidecar_names
from fused_kv_llm.serving import loop_of
from fused_kv_llm.store import Variants
from fused_kv_llm.thread_pool import release_openmp_workers

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
    folder = Path(config.kv_dir).expanduser()
    replaces = config.preprocessing == "fusionrag"
    embedder, prompts = as_embedder(config.embedder), config.preprocessing_prompts
    return Similarity(config.neighbours, embedder, folder, config.tenant, replaces, prompts)


class EngineCorpus:
    """What is done with chunks outside of requests; ``FusedKVEngine`` describes its public methods.

    Parameters
    ----------
    parts : EngineParts
    similarity : Similarity or None
        How the neighbours of chunks are found; None prefills every chunk by itself.
    store_misses : bool
        Whether chunks that prompts contain and the store lacks are ingested in the background.
    view : object
        What the engine's selector sees: chunks that are ingested in the background get the anchors that it asks for.
    variants, variant_bytes : int, int, str or None
        How many variants are kept of a chunk, and bytes of all.
    batch_tokens : int or None
        Tokens of one forward; None leaves it to the loop that owns the model.

    Attributes
    ----------
    variants : Variants or None
        None if none are kept.
    cost : PrefillCost
        What computing tokens costs.
    keeps_prompts : bool
        Whether prompts leave variants of their chunks.
    """

    def __init__(
        self,
        parts: EngineParts,
        similarity: Similarity | None,
        view: object,
        *,
        store_misses: bool,
        variants: int = 0,
        variant_bytes: int | str | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        loaded, store, encode = parts.loaded, parts.store, parts.renderer.encode_chunk
        self._store, self._catalog = store, parts.catalog
        loop = loop_of(loaded.model)
        owner = loop if batch_tokens is None else FixedPieces(loop, batch_tokens)
        room = parts.context_length - len(parts.prefix.token_ids)
        planner = CorpusPlanner(parts.catalog, parts.identity, encode, room)
        self._preprocessor = (
            None if similarity is None else Preprocessor(loaded, store, parts.prefix, planner, similarity, owner)
        )
        self.cost, self._owner = PrefillCost(loaded, store.kv_dir), owner
        self._ingestor = Ingestor(
            loaded, store, parts.identity, parts.prefix, planner, owner, self._preprocessor, self.cost
        )
        self._anchors = AnchorBuilder(loaded, store, parts.prefix, encode, owner)
        self._store_misses, self._preprocessed = store_misses, parts.preprocessed
        limit = None if variant_bytes is None else parse_bytes(variant_bytes, "variant_bytes")
        self.keeps_prompts = True
        self.variants = Variants(store.sidecars, variants, limit) if variants else None
        self._builder = None if self.variants is None else VariantBuilder(loaded, store, self.variants, owner)
        self._background = BackgroundWork(
            self._ingestor,
            self._preprocessor,
            self._builder,
            lambda text: self.build_anchors([text], view, progress=False),
            lambda key: self._renew_anchors(key, view),
        )

    def adopt_from(self, prefixes: PrefixTree, parts: EngineParts) -> None:
        """Take the KV of new chunks from the tree of answered prompts, where it is there, instead of computing it."""
        if prefixes.max_bytes > 0:
            self._ingestor.alternative = AlternativePath(prefixes, parts.loaded, parts.prefix)

    def ingest(self, texts: Iterable[str], neighbours: GivenNeighbours | None, *, progress: bool) -> IngestReport:
        """Prefill every chunk once and store its KV."""
        try:
            return self._ingestor.run(chunk_texts(texts), neighbours=neighbours, progress=progress)
        finally:
            release_openmp_workers()

    def preprocess(
        self, report: IngestReport, when: Preprocess, *, refresh: bool, progress: bool, contexts: int = 0
    ) -> None:
        """Preprocess what is stored and is not preprocessed yet, or have it done in the background."""
        if self._preprocessor is None:
            return
        if when != "later":
            self._background.preprocess(refresh=refresh, contexts=contexts)
        if when == "wait":
            started = time.perf_counter()
            counts = self._background.wait(progress=progress)
            report.preprocessing_seconds = time.perf_counter() - started
            report.chunks_preprocessed = counts.chunks - counts.refreshed
            report.chunks_refreshed, report.chunks_stale = counts.refreshed, counts.stale
            report.bytes_written += counts.nbytes
            report.neighbour_tokens = counts.neighbour_tokens
        report.chunks_pending = self._preprocessor.lacking()

    def build_anchors(self, texts: Iterable[str], view: object, *, progress: bool) -> int:
        """Store the anchors that a view asks for, of chunks that are stored; return how many are new."""
        if not isinstance(view, View) or view.anchors is None:
            return 0
        keys = self.keys_of(chunk_texts(texts))
        return self._anchors.run((key for key in keys if key), view, progress=progress)

    def _renew_anchors(self, key: str, view: object) -> None:
        """Store anchors with a context shift that is new; what was stored with the one before has been removed."""
        if isinstance(view, View) and view.anchor_shift is not None:
            self._anchors.run([key], view, progress=False)

    def delete(self, texts: Iterable[str]) -> int:
        """Delete the stored KV of chunks, and return how many were stored."""
        gone = chunk_texts(texts)
        self._background.forget(gone)
        rows = self._catalog.rows_of(gone)
        self._store.delete({row.key for found in rows.values() for row in found})
        return len(rows)

    def prefetch(self, texts: Iterable[str], view: object) -> list[str | None]:
        """Start loading what a request with this view reads of chunks; expect those without KV in the next prompts."""
        retrieved = chunk_texts(texts)
        keys = self.keys_of(retrieved)
        if self._store_misses and None in keys and self._adopt(retrieved, keys):
            lacked, keys = keys, self.keys_of(retrieved)
            pairs = zip(retrieved, lacked, keys, strict=True)
            self._background.complete(text for text, before, now in pairs if before is None and now is not None)
        sidecars = [] if self._preprocessed is None else [self._preprocessed]
        if isinstance(view, View):
            sidecars += sidecar_names(view)
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

    def _adopt(self, texts: Sequence[str], keys: Sequence[str | None]) -> int:
        return self._ingestor.adopt(dict.fromkeys(text for text, key in zip(texts, keys, strict=True) if key is None))

    # -- in the background -----------------------------------------------------------------------------------

    def expect(self, texts: Iterable[str]) -> None:
        """Remember chunks that have no KV, in case that the next prompts contain them."""
        if self._store_misses:
            self._background.expect(texts)

    def ingest_expected(self, prompt_text: str) -> None:
        """Ingest the remembered chunks that a prompt contains."""
        if self._store_misses:
            self._background.ingest_expected(prompt_text)

    def keep_variants(self, ids: Sequence[int], segments: Sequence[Segment]) -> None:
        """Have the chunks of a prompt kept as they are in it, if variants are kept."""
        if self.variants is not None and self.keeps_prompts:
            self._background.keep_variants(PromptChunks(tuple(ids), tuple(segments)))

    def measure_cost(self) -> None:
        """Time prefills, unless the times are known: a few passes of up to 512 tokens between the steps of requests."""
        self.cost.measure(self._owner)

    def wait(self, *, progress: bool) -> None:
        """Return when there is nothing left to do in the background."""
        self._background.wait(progress=progress)

    def close(self) -> None:
        """Finish the batch under way and stop."""
        self._background.close()
        if self._preprocessor is not None:
            self._preprocessor.close()
