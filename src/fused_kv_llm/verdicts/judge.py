"""Finds out what became of chunks that somebody expected in a prompt, or would like to know of beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity, chunk_texts
from fused_kv_llm.prompt import SearchedText
from fused_kv_llm.report import Outcome, Verdict
from fused_kv_llm.store import ChunkRow, KVStore

from .facts import ChunkFacts
from .near import NearText
from .remedies import verdict_of

__all__ = ["Judge", "JudgedPrompt"]

_MOST_CHUNKS = 256
# For all chunks of one call together; what is stored under which name is looked up beyond it, texts are not compared.
_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """A prompt, and what was found in it.

    Parameters
    ----------
    text : str
        As the model gets it.
    seen : mapping of str to Verdict
        By their whole texts, the chunks that were found in it.
    spans : sequence of (int, int)
        Half-open spans of characters where they stand.
    """

    text: str
    seen: Mapping[str, Verdict] = field(default_factory=dict)
    spans: Sequence[tuple[int, int]] = ()


class Judge:
    """Says of chunks why they were reused, or were not; thread-safe.

    Nothing is said of what other tenants have, unless an operator asks.

    Parameters
    ----------
    store : KVStore
    catalog : ChunkCatalog
    identity : KVIdentity
        Of the KV that is used.
    encode : callable
        Returns the stand-alone ids of a chunk.
    min_tokens, room : int
        Fewest tokens that are reused, and most that a chunk may have.
    """

    def __init__(
        self,
        store: KVStore,
        catalog: ChunkCatalog,
        identity: KVIdentity,
        encode: Callable[[str], Sequence[int]],
        *,
        min_tokens: int,
        room: int,
    ) -> None:
        self._catalog = catalog
        self._facts = ChunkFacts(store, catalog, identity, encode, min_tokens=min_tokens, room=room)

    def judge(
        self,
        expected: Sequence[str],
        prompt: JudgedPrompt | None = None,
        told: Sequence[Verdict] = (),
        *,
        operator: bool = False,
    ) -> list[Verdict]:
        """Return a verdict on each of several chunks.

        Parameters
        ----------
        expected : sequence of str
            Their texts; the first 256 different ones are judged.
        prompt : JudgedPrompt or None
            Where they were expected; None says whether they would be reused in a prompt that contains them.
        told : sequence of Verdict
            What became of chunks of this prompt before, which are not found in it any more.
        operator : bool
            Whether what other tenants have may be told.

        Returns
        -------
        list of Verdict

        Raises
        ------
        CorpusError
            If one string was given instead of several, or a chunk is not text.
        StoreUnavailableError
            If the store cannot be used.
        """
        texts = list(dict.fromkeys(chunk_texts(expected)))[:_MOST_CHUNKS]
        seen = {} if prompt is None else prompt.seen
        unknown = [text for text in texts if text not in seen]
        if not unknown:
            return [seen[text] for text in texts]
        case = _Case(self._facts, prompt, {one.chunk_id: one for one in told}, self._catalog.rows_of(unknown), operator)
        return [seen[text] if text in seen else case.verdict(text) for text in texts]


class _Case:
    """The chunks of one call that were not found."""

    def __init__(
        self,
        facts: ChunkFacts,
        prompt: JudgedPrompt | None,
        told: Mapping[str | None, Verdict],
        rows: Mapping[str, list[ChunkRow]],
        operator: bool,
    ) -> None:
        self._facts, self._prompt, self._told, self._rows, self._operator = facts, prompt, told, rows, operator
        self._searched = None if prompt is None else SearchedText(prompt.text)
        self._until_s = time.perf_counter() + _BUDGET_S

    def verdict(self, text: str) -> Verdict:
        """Say what became of one chunk."""
        short = self._facts.too_short(text)
        if short is not None:
            return short
        rows = self._rows.get(text)
        if rows is None:
            return self._not_stored(text)
        return self._facts.stored(rows[-1]) if self._prompt is None else self._not_found(text, rows[-1], self._prompt)

    def _not_found(self, text: str, row: ChunkRow, prompt: JudgedPrompt) -> Verdict:
        """Say why a chunk that is stored was not found."""
        if row.key in self._told:
            return self._told[row.key]
        if text not in prompt.text:
            changed = self._changed(text, row.key)
            return changed or verdict_of(text, Outcome.NOT_IN_PROMPT, self._why_unknown(), row.key)
        if all(_is_taken(place, prompt.spans) for place in _places(text, prompt.text)):
            detail = "Other chunks take its place in the prompt, which they cover better."
            return verdict_of(text, Outcome.OVERLAP, detail, row.key)
        return verdict_of(text, Outcome.NOT_INGESTED, "It was not stored yet when the prompt was planned.", row.key)

    def _not_stored(self, text: str) -> Verdict:
        """Say why nothing is stored for a text."""
        key = self._facts.key_of(text)
        known = None if key is None else self._told.get(key)
        known = known or self._facts.gone(text, key) or self._facts.elsewhere(text, operator=self._operator)
        known = known or self._facts.too_long(text) or self._like(text)
        return known or verdict_of(text, Outcome.NOT_INGESTED, "Nothing is stored for it.")

    def _changed(self, text: str, key: str | None) -> Verdict | None:
        """Say in which form a text stands in the prompt."""
        if self._searched is None or self._is_late:
            return None
        near = NearText.of(text, self._searched)
        return None if near is None else near.verdict(text, key)

    def _like(self, text: str) -> Verdict | None:
        """Say which other form of a text is stored."""
        if self._is_late:
            return None
        searched = SearchedText(text)
        for row in self._facts.like(text):
            near = None if self._is_late else NearText.of(row.text, searched)
            if near is not None:
                return near.verdict_on_stored(text, row)
        return None

    def _why_unknown(self) -> str:
        if self._is_late:
            return "The prompt does not contain it character for character; there was no time to find out more."
        return "The prompt does not contain it, neither character for character nor in a form that was recognised."

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() > self._until_s


def _places(text: str, prompt: str) -> list[tuple[int, int]]:
    """Return where a text stands, at most at sixteen places."""
    places: list[tuple[int, int]] = []
    at = prompt.find(text)
    while at >= 0 and len(places) < 16:
        places.append((at, at + len(text)))
        at = prompt.find(text, at + 1)
    return places


def _is_taken(place: tuple[int, int], spans: Sequence[tuple[int, int]]) -> bool:
    return any(start < place[1] and place[0] < stop for start, stop in spans)
