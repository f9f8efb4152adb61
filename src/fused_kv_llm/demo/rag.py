"""A LangChain chain over ingested passages: retrieve, fill the prompt, answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fused_kv_llm.demo.retrieval import PassageIndex
from fused_kv_llm.errors import MissingExtraError

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.runnables import Runnable

    from langchain_fused_kv import FusedKVLLM

__all__ = ["TEMPLATE", "Rag"]

TEMPLATE = (
    "{context}\n\nAnswer the following question from the passages above in one short sentence.\nQuestion: {question}"
)
_RESERVED_TOKENS = 128


class Rag:
    """Retrieval-augmented answers from a passage index.

    Parameters
    ----------
    index : PassageIndex
    llm : FusedKVLLM
    k : int
        Passages to retrieve; fewer are used where the model's context does not hold them.

    Attributes
    ----------
    prompt : Runnable
        From a question to the prompt.
    chain : Runnable
        From a question to the answer; a plain LCEL chain.
    passages_wanted, passages_used : int
        Passages there are to retrieve, and those in the latest prompt.

    Raises
    ------
    MissingExtraError
        If ``langchain-core`` is not installed.
    """

    def __init__(self, index: PassageIndex, llm: FusedKVLLM, *, k: int) -> None:
        try:
            from langchain_core.prompts import PromptTemplate
            from langchain_core.runnables import RunnableLambda, RunnablePassthrough

            from langchain_fused_kv import FusedKVRetriever
        except ImportError as error:
            raise MissingExtraError("langchain-core", "langchain") from error
        self._index = index
        self._llm = llm
        self._k = k
        self.passages_wanted = min(k, len(index.passages))
        self.passages_used = 0
        retriever = FusedKVRetriever(retriever=RunnableLambda(self._retrieve), llm=llm)
        self.prompt: Runnable[str, Any] = {
            "context": retriever | _join,
            "question": RunnablePassthrough(),
        } | PromptTemplate.from_template(TEMPLATE)
        self.chain: Runnable[str, str] = self.prompt | llm

    def _retrieve(self, question: str) -> list[Document]:
        from langchain_core.documents import Document

        room = self._llm.engine.context_length - self._llm.max_tokens - _RESERVED_TOKENS
        room -= self._llm.get_num_tokens(question)
        found = []
        for passage in self._index.search(question, self._k):
            room -= self._llm.get_num_tokens(passage.text) + 2
            if room < 0:
                break
            found.append(Document(passage.text, metadata={"source": passage.source}))
        self.passages_used = len(found)
        # The best one last: a small model reads best what stands next to the question.
        return found[::-1]


def _join(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)
