"""Whether a chunk was reused by a request, and if not, why and what helps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Outcome", "Verdict"]

_PREVIEW_CHARS = 80


class Outcome(StrEnum):
    """What became of a chunk."""

    REUSED = "reused"
    """Its stored KV is in the prompt's; what of it was recomputed for quality included."""
    REUSABLE = "reusable"
    """It is stored and sound, and would be reused in a prompt that contains it. Only without a prompt."""
    RECOMPUTED = "recomputed"
    """It was found, but the request had ``recompute_ratio=1``."""
    NOT_INGESTED = "not_ingested"
    """Nothing is stored for its text."""
    OTHER_SETTINGS = "other_settings"
    """It is stored for another model, tokenizer, dtype, storage dtype or chat template."""
    OTHER_TENANT = "other_tenant"
    """Another tenant has it. Only said to operators."""
    RESPACED = "respaced"
    """Its words are in the prompt with other white space."""
    ESCAPED = "escaped"
    """It is in the prompt as a program or a page writes it."""
    SHORTENED = "shortened"
    """Parts of it are in the prompt, others are not."""
    REWRITTEN = "rewritten"
    """Most of it is in the prompt, with other characters in between."""
    NOT_IN_PROMPT = "not_in_prompt"
    """The prompt does not contain it, in no form that was recognised."""
    TOO_SHORT = "too_short"
    """It is too short to be stored, or too little of it is left where its tokens meet the prompt's."""
    TOO_LONG = "too_long"
    """It has more tokens than the model's context."""
    OVERLAP = "overlap"
    """Its place is taken by other chunks that overlap it; each token counts once."""
    EVICTED = "evicted"
    """It made room for others."""
    DELETED = "deleted"
    """It was deleted."""
    DAMAGED = "damaged"
    """Its file could not be used, and was put away."""
    NOT_LOADED = "not_loaded"
    """Its KV was stored, and could not be read in time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one chunk.

    Parameters
    ----------
    text : str
        Its first 80 characters.
    outcome : Outcome
    detail : str
        What was found out, in a sentence.
    remedy : str
        What helps; empty where nothing has to be done.
    diff : str
        From the ingested text to what stands in the prompt, as a short unified diff; empty without.
    chunk_id : str or None
        Key of its stored KV, or of the KV that it had; None where nobody knows.
    tokens : int
        Tokens of the prompt for which its KV was at hand, wherever it stands; those that were recomputed included.
    score : float or None
        What the retriever that found it gave it, in that retriever's own measure; None where it gave nothing.
    """

    text: str
    outcome: Outcome
    detail: str = ""
    remedy: str = ""
    diff: str = ""
    chunk_id: str | None = None
    tokens: int = 0
    score: float | None = None

    @classmethod
    def of(cls, text: str, outcome: Outcome, detail: str = "", remedy: str = "", **more: Any) -> Verdict:
        """Return a verdict on a chunk, given by its whole text."""
        return cls(text[:_PREVIEW_CHARS], outcome, detail, remedy, **more)

    @property
    def is_reused(self) -> bool:
        """Whether the chunk's stored KV was used, or would be."""
        return self.outcome in (Outcome.REUSED, Outcome.REUSABLE)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data, ready for JSON."""
        return {**asdict(self), "outcome": self.outcome.value}
