"""The fair table's grid as data: what is asked, of how many questions, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .ruler import TASKS
from .setting import Setting

__all__ = ["MODELS", "RATIOS", "ROUNDS", "SETS", "WORDS", "Cell", "Round", "cells"]

RATIOS = (0.05, 0.15, 0.3, 0.5)
MODELS = ("smollm2-135m", "gemma3-270m")
SETS = ("squad10", "hotpotqa_train100", "musique_train100")
FRAMES = ("plain", "short")
PASSAGES = (5, 10)
# A passage is a chunk, or passages of one article are joined. Only the articles of squad10 have several passages.
CHUNK_TOKENS = {"squad10": (0, 600)}
# RULER's contexts: about 1,450, 2,900 and 5,900 tokens.
WORDS = (1200, 2500, 5100)


@dataclass(frozen=True, slots=True)
class Round:
    """A sample of the grid.

    Parameters
    ----------
    kind : {"sets", "ruler"}
    axes : int
        On how many axes (model, wording, passages, chunk size; RULER: model, length) a cell may differ from the first.
    ratios : tuple of float
    questions : int
        So many of each cell, those of earlier rounds among them.
    """

    kind: str
    axes: int
    ratios: tuple[float, ...]
    questions: int


# First a look at everything, then more questions where most is read from, then everything again. A question by all
# rules at one ratio takes one to six minutes on a core, by the length of its prompt.
ROUNDS = (
    Round("sets", 0, (0.15,), 4),
    Round("sets", 4, (0.15,), 1),
    Round("ruler", 2, (0.15,), 1),
    Round("sets", 0, RATIOS, 8),
    Round("sets", 1, (0.15,), 6),
    Round("sets", 4, (0.15,), 4),
    Round("sets", 1, RATIOS, 6),
    Round("ruler", 2, (0.15,), 4),
    Round("sets", 4, RATIOS, 4),
    Round("sets", 0, RATIOS, 34),
    Round("sets", 1, RATIOS, 16),
    Round("ruler", 2, RATIOS, 10),
    Round("sets", 4, RATIOS, 34),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid.

    Parameters
    ----------
    model : str
    data : str
        Stem of the question file.
    setting : Setting
    ratio : float
    questions : int
        So many of it.
    """

    model: str
    data: str
    setting: Setting
    ratio: float
    questions: int

    @property
    def name(self) -> str:
        """Return the place in words."""
        chunks = f", {self.setting.chunk_tokens} tokens a chunk" if self.setting.chunk_tokens else ""
        return f"{self.model}, {self.data}, {self.setting.frame}, {self.setting.passages} chunks{chunks}"


def cells(part: str) -> Iterator[Cell]:
    """Return the cells of all rounds in their order; a later round's cell holds an earlier one's questions.

    Parameters
    ----------
    part : {"all", "dev", "held"}
        Of the sets' questions; RULER's are made up and nothing was tuned on them.
    """
    asked: dict[tuple[str, str, Setting, float], int] = {}
    for one in ROUNDS:
        places = list(_sets(part, one.axes) if one.kind == "sets" else _ruler(one.axes))
        # A model is loaded once a round.
        for model, ratio in product(MODELS, one.ratios):
            for data, setting in (place[1:] for place in places if place[0] == model):
                if asked.get(place := (model, data, setting, ratio), 0) < one.questions:
                    asked[place] = one.questions
                    yield Cell(*place, one.questions)


def _sets(part: str, axes: int) -> Iterator[tuple[str, str, Setting]]:
    for model, frame, passages, data in product(MODELS, FRAMES, PASSAGES, SETS):
        for tokens in CHUNK_TOKENS.get(data, (0,)):
            setting = Setting(frame=frame, passages=passages, chunk_tokens=tokens, part=part, answer_tokens=24)
            if (model != MODELS[0]) + (frame != FRAMES[0]) + (passages != PASSAGES[0]) + (tokens != 0) <= axes:
                yield model, data, setting


def _ruler(axes: int) -> Iterator[tuple[str, str, Setting]]:
    for model, words, task in product(MODELS, WORDS, TASKS):
        if (model != MODELS[0]) + (words != WORDS[0]) <= axes:
            yield model, ruler_name(task, words), Setting("instruct", passages=10, order="file", answer_tokens=64)


def ruler_name(task: str, words: int) -> str:
    """Return the stem of a RULER file."""
    return f"ruler_{task}_{words}"
