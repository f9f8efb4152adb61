"""What a fused-KV language model does with the chunks of a corpus, whichever framework's objects they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import CorpusError
from fused_kv_llm.offline import GivenNeighbours, Preprocess
from fused_kv_llm.report import IngestReport, Verdict

__all__ = ["ModelCorpus"]


class ModelCorpus:
    """Ingestion for a model that has an engine; a framework says what its documents are, and where their text is."""

    # What the framework calls a list of texts, for messages.
    items_name: ClassVar[str] = "texts"

    @property
    def engine(self) -> FusedKVEngine:
        """The engine behind this model."""
        raise NotImplementedError(f"{type(self).__name__} has no engine")

    def build_kv_cache(
        self,
        documents: Any,
        *,
        neighbours: GivenNeighbours | None = None,
        preprocess: Preprocess = "background",
        refresh: bool = False,
        prune: bool = False,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill the chunks of a corpus once and store their KV.

        Chunks whose KV is stored already are skipped, so an interrupted or extended ingestion goes on where
        it stopped.

        Parameters
        ----------
        documents : iterable
            The same chunks that the retriever returns: strings, or what the framework has for them, or what it keeps
            them in (LangChain: a loader, a vector store, a document store, a retriever; LlamaIndex: an index, a
            vector store, a document store, a retriever).
        neighbours : mapping, callable or None
            Text to similar or linked texts, nearest first; None compares their vectors, which the embedder makes
            unless a vector store or an index has them from it.
        preprocess : {"background", "wait", "later"}
            When chunks are preprocessed: in the background, before this call returns, or not yet. They can be asked
            about before; see :meth:`FusedKVEngine.build_kv_cache`.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.
        prune : bool
            Whether stored chunks that are not among the documents lose their KV: for a store of one corpus only.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there is nothing to ingest, an item has no text, or a store does not give its documents out.
        StoreFullError
            If the disk is full.
        """
        texts = self._texts_of(documents)
        self._keep_vectors_of(documents, texts)
        # First, so that no chunk gets a neighbour that is about to leave.
        deleted = self._prune(texts) if prune and texts else 0
        report = self.engine.build_kv_cache(
            texts, neighbours=neighbours, preprocess=preprocess, refresh=refresh, progress=progress
        )
        report.chunks_deleted = deleted
        return report

    def _prune(self, texts: Sequence[str]) -> int:
        kept = set(chunk_texts(texts))
        return self.engine.delete_chunks([text for text in self.engine.stored_texts() if text not in kept])

    def delete_kv_cache(self, documents: Any) -> int:
        """Delete the stored KV of chunks that left the corpus.

        Parameters
        ----------
        documents : iterable
            As for :meth:`build_kv_cache`; what has no KV is passed over.

        Returns
        -------
        int
            How many chunks were stored.
        """
        return self.engine.delete_chunks(self._texts_of(documents))

    def explain_chunk(self, document: Any) -> Verdict:
        """Say whether a chunk would be reused, and if not, why.

        Parameters
        ----------
        document : str or document
            As one of those that :meth:`build_kv_cache` takes.

        Returns
        -------
        Verdict

        Raises
        ------
        CorpusError
            If it has no text.
        """
        return self.engine.explain_text(self._text_of(document))

    def _texts_of(self, documents: Any) -> list[str]:
        return [self._text_of(item) for item in self._items_of(documents)]

    def _items_of(self, source: Any) -> list[Any]:
        if isinstance(source, str) or not isinstance(source, Iterable):
            raise CorpusError(f"build_kv_cache takes a list of {self.items_name}; put the single one into a list")
        return list(source)

    def _keep_vectors_of(self, source: Any, texts: Sequence[str]) -> None:
        """Remember the vectors that a framework's index has of texts. Without a framework there is no index."""

    def _text_of(self, item: Any) -> str:
        if isinstance(item, str):
            return item
        raise CorpusError(f"Cannot ingest a {type(item).__name__}: give {self.items_name}")

    def order_chunks(self, texts: Sequence[str], *, remember: bool = True) -> list[int]:
        """Return an order of retrieved texts, see :meth:`fused_kv_llm.FusedKVEngine.order_chunks`."""
        return self.engine.order_chunks(texts, remember=remember)

    def prefetch(self, texts: Sequence[str]) -> list[str | None]:
        """Start loading the KV of texts into memory.

        Parameters
        ----------
        texts : sequence of str

        Returns
        -------
        list of str or None
            The chunk ids; None where no KV is stored.
        """
        return self.engine.prefetch(list(texts))
