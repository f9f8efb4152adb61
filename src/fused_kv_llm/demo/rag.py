"""From a question to a prompt: retrieve passages and put them before the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fused_kv_llm.demo.passages import Passage
from fused_kv_llm.engine import FusedKVEngine

__all__ = ["TEMPLATE", "Rag", "RagPrompt", "Searched"]

# Small models follow an instruction before the passages better.
TEMPLATE = "Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {question}\nAnswer briefly."
_RESERVED_TOKENS = 128


class Searched(Protocol):
    """What finds passages; :class:`fused_kv_llm.demo.PassageIndex` is one."""

    def search(self, query: str, k: int) -> Sequence[Passage]:
        """Return the `k` passages nearest in meaning to a query, best first."""


@dataclass(frozen=True, slots=True)
class RagPrompt:
    """A question with what was retrieved for it.

    Parameters
    ----------
    text : str
        The prompt: the passages, the nearest one last, and the question.
    sources : tuple of Passage
        The passages in the prompt, the nearest one first.
    passages_wanted : int
        How many passages there were to retrieve; more than `sources` where the model's context holds no more.
    """

    text: str
    sources: tuple[Passage, ...]
    passages_wanted: int


class Rag:
    """Writes retrieval prompts for an engine, and lets it load the KV of what was retrieved ahead of the request.

    Parameters
    ----------
    index : Searched
    engine : FusedKVEngine
        Counts tokens, and has the KV of the passages.
    k : int
        Passages to retrieve; fewer are used where the model's context does not hold them.
    max_tokens : int
        Room to leave for the answer.
    """

    def __init__(self, index: Searched, engine: FusedKVEngine, *, k: int, max_tokens: int) -> None:
        self._index = index
        self._engine = engine
        self._k = k
        self._room = engine.context_length - max_tokens - _RESERVED_TOKENS

    def prompt(self, question: str) -> RagPrompt:
        """Retrieve passages for a question and write the prompt."""
        found = self._index.search(question, self._k)
        sources = self._fitting(question, found)
        texts = [passage.text for passage in sources]
        self._engine.prefetch(texts)
        # The nearest one last: a small model reads best what stands next to the question.
        text = TEMPLATE.format(context="\n\n".join(reversed(texts)), question=question)
        return RagPrompt(text, tuple(sources), len(found))

    def _fitting(self, question: str, found: Sequence[Passage]) -> list[Passage]:
        room = self._room - len(self._engine.token_ids(question))
        fitting = []
        for passage in found:
            room -= len(self._engine.token_ids(passage.text)) + 2
            if room < 0:
                break
            fitting.append(passage)
        return fitting
