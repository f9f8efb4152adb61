"""The embedded demo corpus: the handbook of a fictional ferry company, and questions about it."""

from __future__ import annotations

import importlib
import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from fused_kv_llm.demo.comparison import Row, compare, medians
    from fused_kv_llm.demo.embedder import MiniLM
    from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
    from fused_kv_llm.demo.page_cache import drop_page_cache
    from fused_kv_llm.demo.passages import (
        SUFFIXES,
        FoundPassage,
        Passage,
        find_files,
        read_file,
        read_passages,
        split_text,
    )
    from fused_kv_llm.demo.rag import Rag, RagPrompt
    from fused_kv_llm.demo.retrieval import PassageIndex
    from fused_kv_llm.demo.settings import DEMO
    from fused_kv_llm.demo.show import answers, describe, explain, sources, times

__all__ = [
    "DEMO",
    "SUFFIXES",
    "DemoQuestion",
    "FoundPassage",
    "MiniLM",
    "MiniLMEmbedding",
    "Passage",
    "PassageIndex",
    "Rag",
    "RagPrompt",
    "Row",
    "answers",
    "compare",
    "describe",
    "drop_page_cache",
    "explain",
    "find_files",
    "handbook_folder",
    "handbook_passages",
    "handbook_questions",
    "medians",
    "read_file",
    "read_passages",
    "sources",
    "split_text",
    "times",
]

# Imported when first asked for: each needs a framework that the others do not.
_MODULES = {
    "DEMO": "settings",
    "SUFFIXES": "passages",
    "FoundPassage": "passages",
    "Passage": "passages",
    "split_text": "passages",
    "MiniLM": "embedder",
    "MiniLMEmbedding": "llama_embedder",
    "PassageIndex": "retrieval",
    "Rag": "rag",
    "RagPrompt": "rag",
    "Row": "comparison",
    "answers": "show",
    "compare": "comparison",
    "describe": "show",
    "drop_page_cache": "page_cache",
    "explain": "show",
    "find_files": "passages",
    "read_file": "passages",
    "medians": "comparison",
    "read_passages": "passages",
    "sources": "show",
    "times": "show",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


class DemoQuestion(TypedDict):
    """A question about one passage of the handbook, with the text in it that answers the question."""

    question: str
    answer: str
    file: str
    passage: int


def handbook_folder() -> Path:
    """Return the folder of the handbook's text files."""
    return Path(str(files(__package__) / "handbook"))


def handbook_passages() -> list[str]:
    """Return the handbook's passages, in order; blank lines delimit them."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(handbook_folder().glob("*.txt"))]
    return [passage.strip() for text in texts for passage in text.split("\n\n") if passage.strip()]


def handbook_questions() -> list[DemoQuestion]:
    """Return 36 questions: one about the first passage of every file, then the second, then the third."""
    questions: list[DemoQuestion] = json.loads((files(__package__) / "questions.json").read_text(encoding="utf-8"))
    return questions
