"""Texts for tests: the handbook's passages and prompts made of them."""

from __future__ import annotations

import numpy as np

from fused_kv_llm.demo import handbook_passages

PASSAGES = handbook_passages()
SHORT = [passage[:220].rsplit(" ", 1)[0] for passage in PASSAGES]


def rag_prompt(chunks: list[str], question: str = "How many passengers can the Aldebaran carry?") -> str:
    """Return the prompt a typical chain would build."""
    context = "\n\n".join(chunks)
    return f"Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {question}\nAnswer briefly."


class UnusedEmbedder:
    """An embedder that a given graph of neighbours makes superfluous."""

    name = "unused"

    def encode(self, texts: list[str]) -> np.ndarray:
        """Fail."""
        raise AssertionError(texts)
