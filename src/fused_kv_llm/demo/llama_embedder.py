"""The embedded default embedder for LlamaIndex."""

from __future__ import annotations

from typing import Any

from fused_kv_llm.demo.embedder import MiniLM
from fused_kv_llm.errors import MissingExtraError

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
except ImportError as error:
    raise MissingExtraError("llama-index-core", "llama-index") from error

__all__ = ["MiniLMEmbedding"]


class MiniLMEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2 on the CPU; ``Settings.embed_model = MiniLMEmbedding()``."""

    _embedder: MiniLM = PrivateAttr(default_factory=MiniLM)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"model_name": MiniLM.name, **options})

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised forms."""
        return "MiniLMEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embedder.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embedder.embed_query(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed_documents(texts)
