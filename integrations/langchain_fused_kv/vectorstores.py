"""A vector store that keeps the KV of its documents up to date."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from fused_kv_llm.adapter import FusedKVModel, in_thread, keep_index_vectors
from fused_kv_llm.chunk import chunk_text, chunk_texts
from fused_kv_llm.errors import ConfigError, FusedKVWarning
from langchain_fused_kv.index_vectors import vectors_of

__all__ = ["FusedKVVectorStore"]

# Texts that are equal up to the embedder's limit are equally near to a query.
_NEAREST = 4


class FusedKVVectorStore(VectorStore):
    """Wrap a vector store so that documents are prefilled when they are added, and their KV goes when they are deleted.

    It is made for LangChain's own ``index()``: with the wrapper as its destination, documents that left the source
    lose their KV, changed ones are prefilled again, and the rest is not touched. Searches and retrievers are the
    wrapped store's own.

    Parameters
    ----------
    vector_store : VectorStore
        Any. If it cannot find documents by their ids, the KV of deleted ones stays, with a warning.
    llm : FusedKVLLM or ChatFusedKV

    Examples
    --------
    >>> import tempfile
    >>> from langchain_core.documents import Document
    >>> from langchain_core.indexing import InMemoryRecordManager, index
    >>> from langchain_core.vectorstores import InMemoryVectorStore
    >>> from fused_kv_llm.demo.embedder import MiniLM
    >>> from langchain_fused_kv import FusedKVLLM, FusedKVVectorStore
    >>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp())
    >>> store = FusedKVVectorStore(InMemoryVectorStore(MiniLM()), llm)
    >>> records = InMemoryRecordManager("handbook")
    >>> opening = Document("The harbour office at Skeldra opens at six in the morning. " * 3, metadata={"source": "a"})
    >>> tickets = Document("The office sells no tickets for bicycles on Sundays. " * 3, metadata={"source": "b"})
    >>> options = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    >>> index([opening, tickets], records, store, **options)["num_added"]
    2
    >>> index([opening], records, store, **options)["num_deleted"]
    1
    >>> len(llm.engine.stored_texts())
    1
    """

    def __init__(self, vector_store: VectorStore, llm: FusedKVModel) -> None:
        self.vector_store = vector_store
        self.llm = llm

    @property
    def embeddings(self) -> Embeddings | None:
        """The wrapped store's embedder."""
        return self.vector_store.embeddings

    # -- changes ---------------------------------------------------------------------------------------------

    def add_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add texts and prefill them."""
        added = list(texts)
        ids = self.vector_store.add_texts(added, metadatas, **kwargs)
        self._ingest(added, ids)
        return ids

    async def aadd_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add texts and prefill them, in a thread."""
        added = list(texts)
        ids = await self.vector_store.aadd_texts(added, metadatas, **kwargs)
        await in_thread(self._ingest, added, ids)
        return ids

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents and prefill them."""
        ids = self.vector_store.add_documents(documents, **kwargs)
        self._ingest([document.page_content for document in documents], ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents and prefill them, in a thread."""
        ids = await self.vector_store.aadd_documents(documents, **kwargs)
        await in_thread(self._ingest, [document.page_content for document in documents], ids)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, and their KV unless another document has the same text."""
        leaving = self._texts_of(ids)
        done = self.vector_store.delete(ids, **kwargs)
        self._forget(leaving)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, and their KV unless another document has the same text."""
        leaving = await in_thread(self._texts_of, ids)
        done = await self.vector_store.adelete(ids, **kwargs)
        await in_thread(self._forget, leaving)
        return done

    def _ingest(self, texts: list[str], ids: list[str]) -> None:
        if texts:
            inner, engine = self.vector_store, self.llm.engine
            keep_index_vectors(engine, texts, inner.embeddings, lambda: vectors_of(inner, ids))
            engine.build_kv_cache(texts, progress=False)

    def _texts_of(self, ids: Sequence[str] | None) -> list[str]:
        try:
            found = self.vector_store.get_by_ids(ids or [])
        except NotImplementedError:
            ids, found = None, []
        if ids is None:
            warnings.warn(
                f"{type(self.vector_store).__name__} does not show the documents to be deleted, so their KV stays in "
                "the store: delete it with llm.delete_kv_cache(documents).",
                FusedKVWarning,
                stacklevel=3,
            )
        return [document.page_content for document in found]

    def _forget(self, texts: Iterable[str]) -> None:
        # A document that was deleted and added again with other metadata still has the text.
        gone = set(chunk_texts(texts))
        self.llm.engine.delete_chunks([text for text in gone if not self._has(text)])

    def _has(self, text: str) -> bool:
        nearest = self.vector_store.similarity_search(text, k=_NEAREST)
        return any(chunk_text(document.page_content) == text for document in nearest)

    # -- searches --------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the wrapped store's documents."""
        return self.vector_store.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the wrapped store's documents."""
        return await self.vector_store.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Search in the wrapped store."""
        return self.vector_store.similarity_search(query, k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Search in the wrapped store."""
        return await self.vector_store.asimilarity_search(query, k, **kwargs)

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """Return the wrapped store's retriever; every kind of search goes through it."""
        return self.vector_store.as_retriever(**kwargs)

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> NoReturn:
        """Refuse: there is no store to wrap.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(f"Make the vector store first, then {cls.__name__}(vector_store, llm)")
