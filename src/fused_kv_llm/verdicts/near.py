"""Verdicts on chunks that stand in a prompt in another form than the one that was ingested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fused_kv_llm.prompt import NearMatch, SearchedText, difference
from fused_kv_llm.report import Outcome, Verdict
from fused_kv_llm.store import ChunkRow

from .remedies import verdict_of

__all__ = ["NearText"]

_WAYS = {
    Outcome.ESCAPED: "as a program or a page writes it, with escapes",
    Outcome.RESPACED: "with other white space",
    Outcome.SHORTENED: "in parts only",
    Outcome.REWRITTEN: "with other characters in between",
}


@dataclass(frozen=True, slots=True)
class NearText:
    """Another form of an ingested text.

    Parameters
    ----------
    text : str
        What was ingested, or was meant to be.
    match : NearMatch
        What stands in its place.
    """

    text: str
    match: NearMatch

    @classmethod
    def of(cls, text: str, searched: SearchedText) -> Self | None:
        """Look for a text in another form; None if it is not there."""
        match = searched.find(text)
        return None if match is None else cls(text, match)

    def verdict(self, text: str, key: str | None) -> Verdict:
        """Say that a stored chunk is in the prompt in this form."""
        return self._verdict(text, f"It is in the prompt {_WAYS[self._outcome]}.", key)

    def verdict_on_stored(self, text: str, row: ChunkRow) -> Verdict:
        """Say that a text is another form of a stored chunk."""
        return self._verdict(text, f"What is stored is in it {_WAYS[self._outcome]}.", row.key)

    @property
    def _outcome(self) -> Outcome:
        return Outcome(self.match.change)

    def _verdict(self, text: str, detail: str, key: str | None) -> Verdict:
        diff = difference(self.text, self.match.found)
        return verdict_of(text, self._outcome, detail, key, diff=diff)
