"""Long-context tasks in the manner of RULER (Hsieh et al. 2024), cut into passages for cache fusion.

Three tasks: several needles are hidden in a haystack of essays-like sentences and asked for together (multi-query),
one key has several values, all of which are asked for (multi-value), or a chain of assignments has to be followed
(variable tracking). Scored by string match: the share of the expected strings that the answer contains.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, Literal

__all__ = ["TASKS", "Task", "make_ruler"]

Task = Literal["multi_query", "multi_value", "variable_tracking"]
TASKS: tuple[Task, ...] = ("multi_query", "multi_value", "variable_tracking")

_SUBJECTS = ["The harbour", "A gardener", "The night train", "An old map", "The library", "A quiet river", "The baker"]
_VERBS = ["waits for", "remembers", "turns towards", "is painted like", "borrows from", "looks past", "belongs to"]
_OBJECTS = ["the first snow", "a yellow window", "the market square", "an unread letter", "the far hills", "the tide"]
_ENDS = ["in the early morning.", "without a word.", "as it did last year.", "and nobody minds.", "before the rain."]
_KEYS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "juniper", "kestrel", "lotus"]


def _filler(generator: random.Random, words: int) -> list[str]:
    sentences: list[str] = []
    while sum(len(s.split()) for s in sentences) < words:
        sentences.append(" ".join(generator.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)))
    return sentences


def _needles(task: Task, generator: random.Random, count: int) -> tuple[list[str], str, list[str]]:
    """Return the sentences to hide, the question, and the strings an answer must contain."""
    if task == "variable_tracking":
        names = ["".join(generator.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(2 * count)]
        value, other = generator.sample(range(10000, 100000), 2)
        chains = [(names[:count], value), (names[count:], other)]
        lines = [
            f"VAR {name} = {start if i == 0 else f'VAR {chain[i - 1]}'}."
            for chain, start in chains
            for i, name in enumerate(chain)
        ]
        question = f"Find all variables that are assigned the value {value}, directly or through other variables."
        return lines, question, names[:count]
    keys = generator.sample(_KEYS, count)
    numbers = [str(n) for n in generator.sample(range(1000000, 10000000), 2 * count)]
    if task == "multi_query":
        lines = [f"The special magic number for {key} is: {n}." for key, n in zip(keys, numbers, strict=False)]
        asked = f"{', '.join(keys[:-1])} and {keys[-1]}"
        return lines, f"What are all the special magic numbers for {asked}?", numbers[:count]
    lines = [f"One of the special magic numbers for {keys[0]} is: {n}." for n in numbers[:count]]
    lines += [f"One of the special magic numbers for {keys[1]} is: {n}." for n in numbers[count:]]
    return lines, f"What are all the special magic numbers for {keys[0]}?", numbers[:count]


def make_ruler(
    task: Task, count: int, *, words: int = 1500, passages: int = 10, needles: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Return questions in the format of the data files.

    Parameters
    ----------
    task : {"multi_query", "multi_value", "variable_tracking"}
    count : int
        Questions.
    words : int
        Length of the haystack.
    passages : int
        Passages it is cut into, of equal length.
    needles : int
        Strings asked for, 2 to 12; a variable chain of so many names.
    seed : int
        The same seed makes the same questions.

    Returns
    -------
    list of dict
        ``id, question, answers[], passages[], gold_passage_ids[]``. The needles of a chain keep their order.

    Raises
    ------
    ValueError
        If the needles are fewer or more than that, or the words too few to hide them or to fill the passages.
    """
    if not 2 <= needles <= len(_KEYS):
        raise ValueError(f"needles={needles} is outside 2 to {len(_KEYS)}")
    questions = []
    for number in range(count):
        generator = random.Random(f"{task}/{seed}/{number}")
        lines, question, answers = _needles(task, generator, needles)
        hay = _filler(generator, words)
        if len(hay) < max(passages, 2 * needles):
            msg = f"words={words} make {len(hay)} sentences: too few for {passages} passages or {2 * needles} needles"
            raise ValueError(f"{msg}. Give more words.")
        places = sorted(generator.sample(range(len(hay) + 1), len(lines)))
        if task != "variable_tracking":
            generator.shuffle(lines)
        for shift, (place, line) in enumerate(zip(places, lines, strict=True)):
            hay.insert(place + shift, line)
        cut = [round(i * len(hay) / passages) for i in range(passages + 1)]
        texts = [" ".join(hay[a:b]) for a, b in pairwise(cut)]
        found = [
            {"id": f"{task}:{seed}:{number}:{i}", "title": f"part {i + 1}", "text": text}
            for i, text in enumerate(texts)
        ]
        gold = [p["id"] for p in found if any(line in p["text"] for line in lines)]
        questions.append(
            {"id": f"{task}:{seed}:{number}", "question": question, "answers": answers,
             "passages": found, "gold_passage_ids": gold}
        )  # fmt: skip
    return questions
