"""Which tokens of a prompt are chunks and which are fresh text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .align import align
from .content_index import Match
from .encoding import Encoded

__all__ = ["PromptPlan", "Segment", "UnusedMatch", "plan_prompt"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of the prompt's tokens.

    Parameters
    ----------
    start, stop : int
        Half-open token range of the prompt.
    key : str or None
        Key of the chunk whose stored KV holds these tokens; None for fresh text.
    chunk_start : int
        Index, within the chunk's ids, of the token at ``start``; 0 for fresh text.
    """

    start: int
    stop: int
    key: str | None = None
    chunk_start: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the segment."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class UnusedMatch:
    """A chunk that stands in the prompt but is not reused.

    Parameters
    ----------
    match : Match
        Where its text was found.
    reason : {"no_ids", "too_short"}
        ``"no_ids"``: its token ids were not given (not stored, or damaged); ``"too_short"``: the run that
        it shares with the prompt has fewer than ``min_tokens`` tokens.
    tokens : int
        Length of that run; 0 for ``"no_ids"``.
    """

    match: Match
    reason: Literal["no_ids", "too_short"]
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt as a sequence of segments.

    Parameters
    ----------
    ids : list of int
        The prompt's token ids, as the model's own tokenizer made them.
    segments : list of Segment
        Non-empty, contiguous, covering ``[0, len(ids))``; no two neighbours are both fresh.
    unused : list of UnusedMatch
        Chunks found but left to ordinary prefill.
    """

    ids: list[int]
    segments: list[Segment]
    unused: list[UnusedMatch] = field(default_factory=list)

    @property
    def reused_tokens(self) -> int:
        """Tokens in chunk segments."""
        return sum(segment.num_tokens for segment in self.segments if segment.key is not None)


def plan_prompt(
    encoded: Encoded,
    matches: Sequence[Match],
    chunk_ids: Mapping[str, Sequence[int]],
    min_tokens: int,
) -> PromptPlan:
    """Turn the chunks found in a prompt's text into segments of its tokens.

    The tokens wholly inside a match's characters are aligned, on ids, with the chunk's stand-alone ids; the
    shared run becomes a chunk segment, all other tokens are fresh text.

    Parameters
    ----------
    encoded : Encoded
        The tokenised prompt.
    matches : sequence of Match
        Non-overlapping, ascending, as ``ContentIndex.find`` returns them for the text that was encoded.
    chunk_ids : mapping of str to sequence of int
        Stand-alone ids by key. A match whose key is missing stays fresh text.
    min_tokens : int
        Shortest run worth a segment, at least 1.

    Returns
    -------
    PromptPlan

    Raises
    ------
    ConfigError
        If ``min_tokens`` is below 1, or the matches overlap or are not ascending.
    """
    if min_tokens < 1:
        raise ConfigError(f"min_tokens must be at least 1, got {min_tokens}.")
    if any(after.start < before.end for before, after in pairwise(matches)):
        raise ConfigError("Matches must be ascending and must not overlap; pass what ContentIndex.find returned.")
    segments: list[Segment] = []
    unused: list[UnusedMatch] = []
    position = 0
    for match in matches:
        ids = chunk_ids.get(match.key)
        if ids is None:
            unused.append(UnusedMatch(match, "no_ids", 0))
            continue
        first, stop = _tokens_inside(encoded.offsets, match)
        first = max(first, position)
        run = align(encoded.ids[first:stop], ids)
        if run.length < min_tokens:
            unused.append(UnusedMatch(match, "too_short", run.length))
            continue
        start = first + run.slice_start
        if start > position:
            segments.append(Segment(position, start))
        position = start + run.length
        segments.append(Segment(start, position, match.key, run.chunk_start))
    if position < len(encoded.ids):
        segments.append(Segment(position, len(encoded.ids)))
    return PromptPlan(encoded.ids, segments, unused)


def _tokens_inside(offsets: NDArray[np.int64], match: Match) -> tuple[int, int]:
    """Half-open range of the tokens wholly inside the match's characters.

    Tokens of a multi-byte character all carry that character's span, and tokens added by the tokenizer
    carry an empty one at 0, so the range is taken from its outermost members.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.flatnonzero((starts >= match.start) & (ends <= match.end) & (ends > match.start))
    if not len(inside):
        return 0, 0
    return int(inside[0]), int(inside[-1]) + 1
