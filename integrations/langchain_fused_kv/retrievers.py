"""A retriever that starts loading the KV of the documents that another retriever found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol, cast, runtime_checkable

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, run_in_executor
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import ConfigDict, field_validator

from fused_kv_llm.adapter import search_staged
from fused_kv_llm.errors import ConfigError
from langchain_fused_kv.base import LangChainFusedKV
from langchain_fused_kv.staged import staged_retriever

__all__ = ["CHUNK_ID_KEY", "RANK_KEY", "FusedKVRetriever", "PrefetchingLLM"]

CHUNK_ID_KEY = "fused_kv_chunk_id"
RANK_KEY = "fused_kv_rank"

# Where rerankers leave their scores, and retrievers that give documents theirs.
_SCORE_KEYS = ("relevance_score", "score")


@runtime_checkable
class PrefetchingLLM(Protocol):
    """An LLM that takes retrieved texts ahead of the prompt; :class:`langchain_fused_kv.FusedKVLLM` is one."""

    def prefetch(self, texts: Sequence[str]) -> list[str | None]:
        """Start loading the KV of these texts; return their chunk ids, None where no KV is stored."""

    def announce_retrieval(self, texts: Sequence[str], scores: Sequence[float | None] = ()) -> None:
        """Remember that these texts should be in one of the next prompts, and the scores they were found with."""


class FusedKVRetriever(BaseRetriever):
    """Wrap a retriever so that the KV of what it finds is in memory when the LLM needs it.

    Documents are returned as copies with one more entry, ``metadata["fused_kv_chunk_id"]``: the id of the chunk's KV,
    or None if none is stored. Reuse does not depend on this wrapper, because the LLM finds chunks in the prompt by
    their text. It loads KV from the disk while the rest of the chain runs, and lets the LLM warn when retrieved texts
    do not reach the prompt verbatim.

    Parameters
    ----------
    retriever : BaseRetriever or Runnable
        Anything that maps a query to a list of documents. Keyword arguments of ``invoke``, such as ``k``,
        are passed to it.
    llm : FusedKVLLM
        The LLM at the end of the chain; ``llm.bind(...)`` is accepted as well.
    speculative : bool
        Whether loading and computing begin before the search ends, with what it has found so far, while nobody else is
        answered. The retriever must have stages: a method ``stages(query)`` that yields lists of documents, the last
        one final, such as :class:`StagedFaissRetriever` and :class:`QuickFirstRetriever` have; the plain retriever of a
        FAISS vector store gets them. Its ``stages`` is called instead of its ``invoke``, unless there are keyword
        arguments. What is returned is the last stage in any case.
    prompt : callable or None
        Takes the query and the documents, and returns the prompt that the chain will make of them: a string, messages
        or a prompt value. With it the prompt is computed up to its first token while the search goes on. One that turns
        out to differ from the chain's costs only that. None loads the documents' KV only.
    reorder_chunks : bool
        Whether documents are put into an order in which the prompt begins as an earlier one did, so that at ratio 1
        less of it is computed (:meth:`fused_kv_llm.FusedKVEngine.order_chunks`). It changes the prompt, and so perhaps
        the answer. ``metadata["fused_kv_rank"]`` is then the place, from 1, that the retriever gave a document.

    Examples
    --------
    >>> import tempfile
    >>> from langchain_core.documents import Document
    >>> from langchain_core.runnables import RunnableLambda
    >>> from langchain_fused_kv import FusedKVLLM, FusedKVRetriever
    >>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp())
    >>> found = [Document("The harbour office at Skeldra opens at six in the morning. " * 4)]
    >>> _ = llm.build_kv_cache(found, progress=False)
    >>> retriever = FusedKVRetriever(retriever=RunnableLambda(lambda query: found), llm=llm)
    >>> len(retriever.invoke("When does the office open?")[0].metadata["fused_kv_chunk_id"])
    64
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: Runnable[Any, Any]
    llm: PrefetchingLLM
    speculative: bool = False
    prompt: Callable[[str, list[Document]], Any] | None = None
    reorder_chunks: bool = False

    def model_post_init(self, context: Any) -> None:
        """Refuse what cannot work before the first question."""
        super().model_post_init(context)
        if self.prompt is not None and not self.speculative:
            raise ConfigError("prompt= is only used with speculative=True")
        if self.reorder_chunks and not isinstance(self.llm, LangChainFusedKV):
            raise ConfigError(f"reorder_chunks=True needs a FusedKVLLM or ChatFusedKV, not a {type(self.llm).__name__}")
        if self.speculative:
            if not isinstance(self.llm, LangChainFusedKV):
                raise ConfigError(
                    f"speculative=True needs a FusedKVLLM or ChatFusedKV, not a {type(self.llm).__name__}"
                )
            staged_retriever(self.retriever)

    @field_validator("llm", mode="before")
    @classmethod
    def _unwrap_bound_llm(cls, value: Any) -> Any:
        while isinstance(value, RunnableBindingBase):
            value = value.bound
        return value

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        if self.speculative and not kwargs:
            return self._announce(self._search_staged(query))
        found = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self._announce(found)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        if self.speculative and not kwargs:
            return self._announce(await run_in_executor(None, self._search_staged, query))
        found = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return await run_in_executor(None, self._announce, found)

    def _search_staged(self, query: str) -> list[Document]:
        llm, prompt = cast("LangChainFusedKV", self.llm), self.prompt

        def prompt_of(found: Sequence[Document]) -> Any:
            return None if prompt is None else llm.proposed(prompt(query, self._ordered(found, remember=False)))

        stages = staged_retriever(self.retriever).stages(query)
        return list(search_staged(llm, stages, _texts_of, None if prompt is None else prompt_of))

    def _announce(self, found: Any) -> list[Document]:
        if not isinstance(found, list) or not all(isinstance(doc, Document) for doc in found):
            kind = type(found[0]).__name__ if isinstance(found, list) and found else type(found).__name__
            raise ConfigError(
                f"The wrapped retriever returned {kind!r} instead of a list of Document: FusedKVRetriever "
                "goes directly around the retriever, before the step that joins the documents into text."
            )
        found = self._ordered(found, remember=True)
        texts = [doc.page_content for doc in found]
        chunk_ids = self.llm.prefetch(texts)
        self.llm.announce_retrieval(texts, [_score_of(doc) for doc in found])
        return [
            doc.model_copy(update={"metadata": {**doc.metadata, CHUNK_ID_KEY: chunk_id}})
            for doc, chunk_id in zip(found, chunk_ids, strict=True)
        ]

    def _ordered(self, found: Sequence[Document], *, remember: bool) -> list[Document]:
        if not self.reorder_chunks:
            return list(found)
        order = cast("LangChainFusedKV", self.llm).order_chunks(_texts_of(found), remember=remember)
        return [found[at].model_copy(update={"metadata": {**found[at].metadata, RANK_KEY: at + 1}}) for at in order]


def _score_of(document: Document) -> float | None:
    """Return the score that a retriever or a reranker has left in the metadata, None without."""
    for name in _SCORE_KEYS:
        score = document.metadata.get(name)
        if isinstance(score, Real):
            return float(score)
    return None


def _texts_of(found: Sequence[Document]) -> list[str]:
    return [doc.page_content for doc in found]
