"""The embedded demo corpus: the handbook of a fictional ferry company, and questions about it."""

from __future__ import annotations

import importlib
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from fused_kv_llm.demo.comparison import Row, as_table, compare, describe
    from fused_kv_llm.demo.embedder import MiniLM
    from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
    from fused_kv_llm.demo.passages import read_passages
    from fused_kv_llm.demo.rag import Rag
    from fused_kv_llm.demo.retrieval import PassageIndex

__all__ = [
    "DemoQuestion",
    "MiniLM",
    "MiniLMEmbedding",
    "PassageIndex",
    "Rag",
    "Row",
    "as_table",
    "compare",
    "describe",
    "handbook_passages",
    "handbook_questions",
    "read_passages",
]

# Imported when first asked for: each needs a framework that the others do not.
_MODULES = {
    "MiniLM": "embedder",
    "MiniLMEmbedding": "llama_embedder",
    "PassageIndex": "retrieval",
    "Rag": "rag",
    "Row": "comparison",
    "as_table": "comparison",
    "compare": "comparison",
    "describe": "comparison",
    "read_passages": "passages",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


class DemoQuestion(TypedDict):
    """A question about the handbook with its answer."""

    question: str
    answer: str
    passages_needed: int
    file: str


def handbook_passages() -> list[str]:
    """Return the handbook's passages, in order; blank lines delimit them."""
    folder = files(__package__) / "handbook"
    texts = [
        f.read_text(encoding="utf-8") for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith(".txt")
    ]
    return [passage.strip() for text in texts for passage in text.split("\n\n") if passage.strip()]


def handbook_questions() -> list[DemoQuestion]:
    """Return questions with answers; the first three need one passage each."""
    questions: list[DemoQuestion] = json.loads((files(__package__) / "questions.json").read_text(encoding="utf-8"))
    return questions
