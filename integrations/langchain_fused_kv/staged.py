"""Retrievers that say what they have found before their search ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, Field

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.retrieval import FaissStages, QuickFirst, StagedSearch, last_of

__all__ = ["QuickFirstRetriever", "StagedFaissRetriever", "staged_retriever"]


class StagedFaissRetriever(BaseRetriever):
    """Searches LangChain's FAISS vector store in stages; its results are those of ``similarity_search``.

    Parameters
    ----------
    vector_store : langchain_community.vectorstores.FAISS
        IVF and HNSW indexes have stages; others are searched at once.
    k : int
        Documents to return.
    num_stages : int
        See :class:`fused_kv_llm.retrieval.FaissStages`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    vector_store: Any
    k: int = Field(default=4, ge=1)
    num_stages: int = Field(default=4, ge=1)

    def stages(self, query: str) -> Iterator[list[Document]]:
        """Yield the documents found so far, the last ones final."""
        store = self.vector_store
        vector = store._embed_query(query)
        if store._normalize_L2:
            # As the store does; of a single vector.
            norm = sum(value * value for value in vector) ** 0.5
            vector = [value / norm for value in vector] if norm else vector
        for _, places in FaissStages(store.index, self.num_stages).search(vector, self.k):
            yield [store.docstore.search(store.index_to_docstore_id[int(place)]) for place in places if place >= 0]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return last_of(self.stages(query))


class QuickFirstRetriever(BaseRetriever):
    """A quick retriever whose documents are provisional, and a slow one whose documents are returned.

    Parameters
    ----------
    quick : Runnable
        For example a small local copy of a remote vector store. If it fails the slow one goes on without it.
    slow : Runnable
        The retriever whose documents count.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    quick: Runnable[Any, Any]
    slow: Runnable[Any, Any]

    def stages(self, query: str) -> Iterator[list[Document]]:
        """Yield the quick retriever's documents, and then the slow one's."""
        yield from QuickFirst(self.quick.invoke, self.slow.invoke).stages(query)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found: list[Document] = self.slow.invoke(query, config={"callbacks": run_manager.get_child()})
        return found


def staged_retriever(retriever: Any) -> StagedSearch:
    """Return a retriever that has stages.

    Parameters
    ----------
    retriever : object
        One with a method ``stages(query)``, or the plain similarity retriever of a FAISS vector store.

    Raises
    ------
    ConfigError
        If it has none, and is no such retriever.
    """
    if isinstance(retriever, StagedSearch):
        return retriever
    store = getattr(retriever, "vectorstore", None)
    if isinstance(retriever, VectorStoreRetriever) and hasattr(store, "index_to_docstore_id"):
        options = dict(retriever.search_kwargs)
        k = options.pop("k", 4)
        if retriever.search_type == "similarity" and not options:
            return StagedFaissRetriever(vector_store=store, k=k)
        raise ConfigError(
            f"A FAISS retriever with search_type={retriever.search_type!r} and {', '.join(options) or 'no options'} "
            "has no stages: only plain similarity with k has. Use speculative=False, or write a retriever with a "
            "method stages(query)."
        )
    raise ConfigError(
        f"speculative=True needs a retriever with a method stages(query) that yields lists of documents, the last one "
        f"final, or that of a FAISS vector store; {type(retriever).__name__} is neither. For a remote store put a "
        "quick one in front: QuickFirstRetriever(quick=..., slow=...)."
    )
