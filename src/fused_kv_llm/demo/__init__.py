"""The embedded demo corpus: the handbook of a fictional ferry company, and questions about it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TypedDict

__all__ = ["DemoQuestion", "handbook_passages", "handbook_questions"]


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
