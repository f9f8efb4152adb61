"""Reading question sets and writing prompts.

One question a line: ``id, question, answers[], passages[{id, title, text}], gold_passage_ids[]``.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FRAMES", "Question", "read_corpus", "read_questions"]

FRAMES = {
    "plain": "Context:\n{}\n\nQuestion: {}\nAnswer:",
    "short": "Answer the question with a short phrase from these passages.\n\n{}\n\nQuestion: {}\nShort answer:",
    "instruct": "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer with a few words.",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question with the passages that stand in its prompt.

    Parameters
    ----------
    id, question : str
    answers : tuple of str
        Accepted answers; the first is the gold answer of teacher forcing.
    passages : tuple of str
        In prompt order.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    def prompt(self, frame: str) -> str:
        """Return the prompt text in one of `FRAMES`."""
        return FRAMES[frame].format("\n\n".join(self.passages), self.question)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def read_questions(path: Path, count: int, num_passages: int, order: str = "shuffled") -> list[Question]:
    """Return the first `count` questions (0: all), `num_passages` passages each, the gold ones among them.

    Gold passages are taken first, then the others in file order. Then they are shuffled by the question's id, so
    that a run with another `count` sees the same prompts; `order` "file" puts them back into the file's order.
    """
    questions = []
    for record in _records(path)[: count or None]:
        gold = [p["text"] for p in record["passages"] if p["id"] in record["gold_passage_ids"]]
        others = [p["text"] for p in record["passages"] if p["id"] not in record["gold_passage_ids"]]
        texts = [*gold, *others][:num_passages]
        if order == "file":
            texts = [p["text"] for p in record["passages"] if p["text"] in texts]
        else:
            random.Random(record["id"]).shuffle(texts)
        questions.append(Question(record["id"], record["question"], tuple(record["answers"]), tuple(texts)))
    return questions


def read_corpus(path: Path) -> list[str]:
    """Return the distinct passages of a whole set: what preprocessing draws its neighbours from."""
    return list(dict.fromkeys(p["text"] for record in _records(path) for p in record["passages"]))
