"""Which tokens of one prompt were reused, recomputed or fresh, and where they stand in its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["PromptTrace", "Run", "SelectionTrace", "TokenState"]

TokenState = Literal["prefix", "reused", "recomputed", "fresh"]

_STATES: tuple[TokenState, ...] = ("prefix", "reused", "recomputed", "fresh")
_PREFIX, _REUSED, _RECOMPUTED, _FRESH = range(4)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of the same state and chunk.

    Parameters
    ----------
    text : str
        What they stand for; runs of one prompt join to its whole text.
    state : {"prefix", "reused", "recomputed", "fresh"}
    chunk : int or None
        Which of the prompt's chunks, from 0; None outside chunks.
    tokens : int
    """

    text: str
    state: TokenState
    chunk: int | None
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SelectionTrace:
    """What a selector went by.

    Parameters
    ----------
    layers : tuple of int
        The model's layers that it looked at.
    scores : numpy.ndarray
        float32 ``[layers, chunk tokens]``, the question's attention to each chunk token, mean over heads.
    total : numpy.ndarray
        float32 ``[chunk tokens]``, by which it ranked them.
    """

    layers: tuple[int, ...]
    scores: NDArray[np.float32]
    total: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptTrace:
    """The tokens of a prompt and what became of them.

    Parameters
    ----------
    text : str
        The rendered prompt.
    offsets : numpy.ndarray
        int64 ``[tokens, 2]``, half-open character spans in `text`.
    kind : numpy.ndarray
        int64 ``[tokens]``: -2 exact prefix, -1 fresh text, otherwise the number of the chunk.
    recomputed : numpy.ndarray
        int64 positions of the chunk tokens that were recomputed.
    model_layers : int
        Layers of the model.
    selection : SelectionTrace or None
        Only where scores were asked for, and the selector looks at the question's attention.
    """

    text: str
    offsets: NDArray[np.int64]
    kind: NDArray[np.int64]
    recomputed: NDArray[np.int64]
    model_layers: int = 0
    selection: SelectionTrace | None = None

    def states(self) -> NDArray[np.int64]:
        """Return per token 0 prefix, 1 reused, 2 recomputed, 3 fresh, as int64 ``[tokens]``."""
        states = np.where(self.kind == -2, _PREFIX, np.where(self.kind == -1, _FRESH, _REUSED))
        states[self.recomputed] = _RECOMPUTED
        return states

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain data, ready for JSON.

        Returns
        -------
        dict
            ``text``; ``tokens``, ``[begin, end]`` of each in the text, in characters; ``states``, as :meth:`states`
            numbers them; ``chunk``, the number of each token's chunk, -1 outside chunks; ``model_layers``; and
            ``selection``, None or a dict of ``layers``, ``scores``, for each of them a list with a number for each
            chunk token in order, and ``total``, a number for each token, None outside chunks.
        """
        return {
            "text": self.text,
            "tokens": self.offsets.tolist(),
            "states": self.states().tolist(),
            "chunk": np.maximum(self.kind, -1).tolist(),
            "model_layers": self.model_layers,
            "selection": None if self.selection is None else self._selection_as_dict(self.selection),
        }

    def _selection_as_dict(self, selection: SelectionTrace) -> dict[str, Any]:
        total: list[float | None] = [None] * len(self.kind)
        for position, score in zip(np.flatnonzero(self.kind >= 0).tolist(), _short(selection.total), strict=True):
            total[position] = score
        return {"layers": list(selection.layers), "scores": [_short(row) for row in selection.scores], "total": total}

    def runs(self) -> Iterator[Run]:
        """Yield the prompt as runs, in order."""
        states = self.states()
        tokens = len(states)
        changes = (states[1:] != states[:-1]) | (self.kind[1:] != self.kind[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        # A run reaches to where the next one begins, so that text between tokens is not lost.
        begins = np.maximum.accumulate(self.offsets[:, 0]).tolist()
        for number, start in enumerate(starts):
            last = number + 1 == len(starts)
            stop = tokens if last else starts[number + 1]
            text = self.text[(begins[start] if number else 0) : (len(self.text) if last else begins[stop])]
            chunk = int(self.kind[start])
            yield Run(text, _STATES[states[start]], chunk if chunk >= 0 else None, stop - start)

    def chunks(self) -> list[tuple[str, int, int]]:
        """Return per chunk its text, its reused tokens and its recomputed tokens, in order."""
        found: dict[int, list[Run]] = {}
        for run in self.runs():
            if run.chunk is not None:
                found.setdefault(run.chunk, []).append(run)
        return [
            (
                "".join(run.text for run in runs),
                sum(run.tokens for run in runs if run.state == "reused"),
                sum(run.tokens for run in runs if run.state == "recomputed"),
            )
            for _, runs in sorted(found.items())
        ]


def _short(scores: NDArray[np.float32]) -> list[float]:
    """Return numbers with four digits, which tell colours and ranks apart and take half the space."""
    return [float(f"{score:.4g}") for score in scores.tolist()]
