"""Reading question sets and writing prompts.

One question a line: ``id, question, answers[], passages[{id, title, text}], gold_passage_ids[]``.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FRAMES", "PARTS", "Question", "is_held_back", "read_corpus", "read_lines", "read_questions"]

PARTS = ("all", "dev", "held")

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


def is_held_back(question_id: str) -> bool:
    """Return whether a question is of the third that nothing is tuned on, which a hash of its id decides."""
    return int(hashlib.sha256(question_id.encode()).hexdigest()[:8], 16) % 3 == 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def read_questions(
    path: Path,
    count: int,
    num_passages: int,
    order: str = "shuffled",
    *,
    part: str = "all",
    chunks: Mapping[str, str] | None = None,
) -> list[Question]:
    """Return the first `count` questions (0: all) of a part, `num_passages` chunks each, the gold ones among them.

    Gold passages are taken first, then the others in file order. Then they are shuffled by the question's id, so
    that a run with another `count` sees the same prompts; `order` "file" puts them back into the file's order.

    Parameters
    ----------
    path : Path
    count, num_passages : int
    order : {"shuffled", "file"}
    part : {"all", "dev", "held"}
        "held" are the questions that are held back, "dev" the others.
    chunks : mapping of str to str or None
        The chunk that stands in the prompt for a passage's id; without one it is the passage's text.
    """
    chunks = chunks or {}
    questions = []
    for record in read_lines(path):
        if part != "all" and is_held_back(record["id"]) != (part == "held"):
            continue
        texts = {p["id"]: chunks.get(p["id"], p["text"]) for p in record["passages"]}
        gold = [texts[p["id"]] for p in record["passages"] if p["id"] in record["gold_passage_ids"]]
        taken = list(dict.fromkeys([*gold, *texts.values()]))[:num_passages]
        if order == "file":
            taken = [text for text in dict.fromkeys(texts.values()) if text in taken]
        else:
            random.Random(record["id"]).shuffle(taken)
        questions.append(Question(record["id"], record["question"], tuple(record["answers"]), tuple(taken)))
    return questions[: count or None]


def read_corpus(path: Path) -> list[str]:
    """Return the distinct passages of a whole set: what preprocessing draws its neighbours from."""
    return list(dict.fromkeys(p["text"] for record in read_lines(path) for p in record["passages"]))
