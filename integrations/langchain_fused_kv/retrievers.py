"""A retriever that starts loading the KV of the documents that another retriever found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, run_in_executor
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import ConfigDict, field_validator

from fused_kv_llm.errors import ConfigError

__all__ = ["CHUNK_ID_KEY", "FusedKVRetriever", "PrefetchingLLM"]

CHUNK_ID_KEY = "fused_kv_chunk_id"


@runtime_checkable
class PrefetchingLLM(Protocol):
    """An LLM that takes retrieved texts ahead of the prompt; :class:`langchain_fused_kv.FusedKVLLM` is one."""

    def prefetch(self, texts: Sequence[str]) -> list[str | None]:
        """Start loading the KV of these texts; return their chunk ids, None where no KV is stored."""

    def announce_retrieval(self, texts: Sequence[str]) -> None:
        """Remember that these texts should be in one of the next prompts."""


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

    @field_validator("llm", mode="before")
    @classmethod
    def _unwrap_bound_llm(cls, value: Any) -> Any:
        while isinstance(value, RunnableBindingBase):
            value = value.bound
        return value

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self._announce(found)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return await run_in_executor(None, self._announce, found)

    def _announce(self, found: Any) -> list[Document]:
        if not isinstance(found, list) or not all(isinstance(doc, Document) for doc in found):
            kind = type(found[0]).__name__ if isinstance(found, list) and found else type(found).__name__
            raise ConfigError(
                f"The wrapped retriever returned {kind!r} instead of a list of Document: FusedKVRetriever "
                "goes directly around the retriever, before the step that joins the documents into text."
            )
        texts = [doc.page_content for doc in found]
        chunk_ids = self.llm.prefetch(texts)
        self.llm.announce_retrieval(texts)
        return [
            doc.model_copy(update={"metadata": {**doc.metadata, CHUNK_ID_KEY: chunk_id}})
            for doc, chunk_id in zip(found, chunk_ids, strict=True)
        ]
