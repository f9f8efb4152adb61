"""Questions that the model itself writes for chunks of its corpus, where a caller has none.

A calibration should ask what users ask: questions in form, about something in particular, that a search answers with
the right chunk. The model is shown three texts with a question each and continues the fourth. The question's first word
is given, in an order that is drawn, so that questions are of several kinds. The first candidate counts that is a
question in form, speaks of what the chunk speaks of, and whose search brings the chunk back among the first three (the
round trip of Alberti et al., *Synthetic QA Corpora Generation with Roundtrip Consistency*, 2019, by the search instead
of a reader). Small models write some that the chunk does not answer. That matters less than it seems: what is compared
is full prefill's answer, whatever it is.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import PromptTooLongError
from fused_kv_llm.offline import questions_from_chunks
from fused_kv_llm.prompt import RawPrompt

__all__ = ["MadeQuestions", "fault_of", "made_questions"]

Search = Callable[[str, int], list[str]]

_SHOWN = (
    (
        "The Danube rises in the Black Forest and flows 2,850 kilometres to the Black Sea. Ten countries lie along it, "
        "more than along any other river. Its largest tributary is the Sava, which joins it at Belgrade.",
        "Where does the Sava join the Danube?",
    ),
    (
        "Penicillin was discovered by Alexander Fleming in 1928, when mould killed bacteria in a dish that he had left "
        "open. It took until 1942 before enough of it was made to treat a patient.",
        "When was penicillin discovered?",
    ),
    (
        "Honey bees dance to tell others where food is. The angle of the dance shows the direction from the sun, and "
        "its length the distance.",
        "How do honey bees tell others where food is?",
    ),
)
# Without "Why" and "Which": small models ask for reasons that nobody gave, and offer a choice of answers.
_OPENERS = ("What", "Who", "When", "Where", "How")
_BEGINNINGS = tuple(f"{opener} " for opener in _OPENERS)
_SPARE = 4
_GIVEN_UP_AFTER = 10
_FOUND_AMONG = 3
_MOST_TOKENS = 32
_MOST_CHARS = 4000
_FEWEST_WORDS, _MOST_WORDS = 3, 25
_LETTERS = 4
_STEM = 5
_GROUNDED = 0.6
_EMPTY_WORDS = """
about after also been before called does from have into main many more most much name named only over person purpose
some such than that their them then there these they this those under used very were what when where which while will
with would your
"""
_EMPTY = frozenset(_EMPTY_WORDS.split())
_POINTS_AT_THE_TEXT = re.compile(r"\b(this|the|above|following) (text|passage|paragraph|article|sentence)\b", re.I)


@dataclass(frozen=True, slots=True)
class MadeQuestions:
    """Questions, and how they came about.

    Parameters
    ----------
    asked : list of (str, str)
        Questions, each with the chunk that it was made from.
    written : int
        How many of them the model wrote; the others quote the beginning of a sentence and ask how it goes on.
    chunks_tried : int
        For how many chunks it was asked to.
    faults : dict of str to int
        Why its candidates were thrown out, and how many.
    """

    asked: list[tuple[str, str]]
    written: int = 0
    chunks_tried: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """How they came about, in words."""
        quoted = len(self.asked) - self.written
        parts = [f"{self.written} written by the model"] if self.written else []
        parts += [f"{quoted} that quote the corpus"] if quoted else []
        return " and ".join(parts)


def made_questions(
    engine: FusedKVEngine, chunks: Sequence[str], count: int, search: Search, seed: int = 0
) -> MadeQuestions:
    """Have a model write questions about chunks, one a chunk; where too few can be used, sentences are quoted.

    Parameters
    ----------
    engine : FusedKVEngine
        Its model writes, greedily and by full prefill.
    chunks : sequence of str
        All chunks of the corpus.
    count : int
        Questions at most.
    search : callable
        Question and count to so many chunks, nearest first.
    seed : int
        For the chunks and the first words that are drawn.

    Returns
    -------
    MadeQuestions
        The first ones are the same for every larger `count`, as long as the model writes enough.
    """
    drawn, asked, faults, tried = random.Random(seed), dict[str, str](), Counter[str](), 0
    for chunk in drawn.sample(list(chunks), len(chunks)):
        if len(asked) == count or tried == 2 * count + _SPARE or (tried == _GIVEN_UP_AFTER and not asked):
            break
        tried += 1
        question = _first(engine, chunk, drawn.sample(_OPENERS, len(_OPENERS)), search, faults)
        if question is not None:
            asked.setdefault(question, chunk)
    written = len(asked)
    if written < count:
        rest = set(chunks) - set(asked.values())
        for question, chunk in questions_from_chunks([one for one in chunks if one in rest], count - written, seed):
            asked[question] = chunk
    return MadeQuestions(list(asked.items()), written, tried, dict(faults))


def fault_of(question: str, chunk: str) -> str | None:
    """Return what keeps a text from being a question about a chunk that users could ask; None if nothing does.

    Parameters
    ----------
    question, chunk : str

    Returns
    -------
    str or None
        ``"no question"``, ``"length"``, ``"repeats itself"``, ``"points at the text"`` or ``"not of the chunk"``: of
        the words with a meaning of their own, 60 % have to begin as words of the chunk do.
    """
    words = re.findall(r"\w+", question.lower())
    if not question.endswith("?") or "\n" in question or not question.startswith(_BEGINNINGS):
        return "no question"
    if not _FEWEST_WORDS <= len(words) <= _MOST_WORDS:
        return "length"
    pairs = Counter(zip(words, words[1:], words[2:], strict=False))
    if pairs and pairs.most_common(1)[0][1] > 1:
        return "repeats itself"
    if _POINTS_AT_THE_TEXT.search(question):
        return "points at the text"
    meant = {w[:_STEM] for w in words if (len(w) >= _LETTERS or w.isdigit()) and w not in _EMPTY}
    there = {w[:_STEM] for w in re.findall(r"\w+", chunk.lower())}
    return None if meant and len(meant & there) >= _GROUNDED * len(meant) else "not of the chunk"


def _first(
    engine: FusedKVEngine, chunk: str, openers: Sequence[str], search: Search, faults: Counter[str]
) -> str | None:
    """Return the first candidate that can be used; None if there is none."""
    for opener in openers:
        question = _written(engine, chunk, opener)
        fault = fault_of(question, chunk)
        if fault is None and chunk not in search(question, _FOUND_AMONG):
            fault = "other chunks are found"
        if fault is None:
            return question
        faults[fault] += 1
    return None


def _written(engine: FusedKVEngine, chunk: str, opener: str) -> str:
    """Have the model continue a question; without a question mark it ends with none."""
    shown = "".join(f"Text: {text}\nQuestion: {question}\n\n" for text, question in _SHOWN)
    prompt = RawPrompt(f"{shown}Text: {chunk[:_MOST_CHARS]}\nQuestion: {opener}")
    ends = sorted(end_token_ids(engine.loaded))

    def goes_on(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        open_ended = logits.clone()
        open_ended[ends] = -torch.inf
        return open_ended

    try:
        answer = engine.generate(prompt, max_tokens=_MOST_TOKENS, stop="?", recompute_ratio=1.0, constraint=goes_on)
    except PromptTooLongError:
        return ""
    mark = "?" if answer.finish_reason == "stop" else ""
    return f"{opener}{answer.text.rstrip()}{mark}"
