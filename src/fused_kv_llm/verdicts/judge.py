"""Finds out what became of chunks that somebody expected in a prompt, or would like to know of beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity, chunk_key, chunk_texts
from fused_kv_llm.prompt import WINDOW, SearchedText, content_hash, is_indexable
from fused_kv_llm.report import Outcome, Verdict
from fused_kv_llm.store import ChunkRow, KVStore

from .near import NearText
from .remedies import remedy_of
from .settings import setting_names

__all__ = ["Judge", "JudgedPrompt"]

_MOST_CHUNKS = 256
# For all chunks of one call together; what is stored under which name is looked up beyond it, texts are not compared.
_BUDGET_S = 0.5
_MOST_ENCODED_CHARS = 100_000
_GONE = {"evicted": Outcome.EVICTED, "deleted": Outcome.DELETED, "damaged": Outcome.DAMAGED}


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
        self._store, self._catalog, self._identity = store, catalog, identity
        self._encode, self._min_tokens, self._room = encode, min_tokens, room

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
        case = _Case(self, prompt, {one.chunk_id: one for one in told}, self._catalog.rows_of(unknown), operator)
        return [seen[text] if text in seen else case.verdict(text) for text in texts]

    def key_of(self, text: str) -> str | None:
        """Return the key that a chunk's KV has, or would have; None for a text too long to be looked at."""
        if len(text) > _MOST_ENCODED_CHARS:
            return None
        return chunk_key(self._identity.digest, self._encode(text))

    def stored(self, row: ChunkRow) -> Verdict:
        """Say of a chunk that is stored whether it can be read."""
        if len(row.token_ids) < self._min_tokens:
            return self._too_short(row.text, f"It has {len(row.token_ids)} tokens, {self._min_tokens} are needed.")
        found = self._store.open(row.key, row.token_ids, counted=False)
        if found is not None:
            right = found.identity == self._identity.digest
            found.close()
            if right:
                tokens = len(row.token_ids)
                return Verdict.of(
                    row.text, Outcome.REUSABLE, f"Its {tokens} tokens are stored.", chunk_id=row.key, tokens=tokens
                )
        return self.gone(row.text, row.key) or _verdict(
            row.text, Outcome.NOT_LOADED, "Its KV is stored, and could not be read just now.", row.key
        )

    def gone(self, text: str, key: str | None) -> Verdict | None:
        """Say why a chunk is not stored any more; None if it never was, as far as that is known."""
        why = None if key is None else self._store.departures([key]).get(key)
        if why is None:
            return None
        details = {
            "evicted": "Its KV was stored, and made room for other chunks.",
            "deleted": "Its KV was stored, and was deleted.",
            "damaged": "Its file could not be used, and was put away.",
        }
        return _verdict(text, _GONE[why], details[why], key)

    def elsewhere(self, text: str, *, operator: bool) -> Verdict | None:
        """Say under which other settings a text is stored; None if under none that may be told."""
        tenant, namespaces, content = self._identity.tenant, self._store.namespaces, content_hash(text)
        own = {one.digest: one for one in namespaces.of_tenant(tenant) if one.digest != self._identity.digest}
        holding = sorted(namespaces.holding(content, list(own)))
        if holding:
            names = namespaces.names()
            other = own[holding[0]]
            detail = f"It is stored with another {setting_names(self._identity, other)}"
            known = names.get(other.digest)
            detail += f" ({known})." if known else "."
            return _verdict(text, Outcome.OTHER_SETTINGS, detail)
        if operator and namespaces.holding(content, namespaces.of_others(tenant)):
            return _verdict(text, Outcome.OTHER_TENANT, "Another tenant has stored it.")
        return None

    def like(self, text: str) -> list[ChunkRow]:
        """Return stored chunks that may be the text in another form."""
        return self._catalog.rows_like(text)

    def too_short(self, text: str) -> Verdict | None:
        """Say of a text that it is too short to be stored."""
        if is_indexable(text):
            return None
        return self._too_short(text, f"It has {len(text)} characters, {WINDOW} are needed.")

    def too_long(self, text: str) -> Verdict | None:
        """Say of a text that it does not fit the model's context."""
        if len(text) > _MOST_ENCODED_CHARS or len(self._encode(text)) <= self._room:
            return None
        return _verdict(text, Outcome.TOO_LONG, f"It has more than the {self._room} tokens that a chunk may have.")

    @staticmethod
    def _too_short(text: str, detail: str) -> Verdict:
        return _verdict(text, Outcome.TOO_SHORT, detail)


class _Case:
    """The chunks of one call that were not found."""

    def __init__(
        self,
        judge: Judge,
        prompt: JudgedPrompt | None,
        told: Mapping[str | None, Verdict],
        rows: Mapping[str, list[ChunkRow]],
        operator: bool,
    ) -> None:
        self._judge, self._prompt, self._told, self._rows, self._operator = judge, prompt, told, rows, operator
        self._searched = None if prompt is None else SearchedText(prompt.text)
        self._until_s = time.perf_counter() + _BUDGET_S

    def verdict(self, text: str) -> Verdict:
        """Say what became of one chunk."""
        short = self._judge.too_short(text)
        if short is not None:
            return short
        rows = self._rows.get(text)
        if rows is None:
            return self._not_stored(text)
        return self._judge.stored(rows[-1]) if self._prompt is None else self._not_found(text, rows[-1], self._prompt)

    def _not_found(self, text: str, row: ChunkRow, prompt: JudgedPrompt) -> Verdict:
        """Say why a chunk that is stored was not found."""
        if row.key in self._told:
            return self._told[row.key]
        if text not in prompt.text:
            changed = self._changed(text, row.key)
            return changed or _verdict(text, Outcome.NOT_IN_PROMPT, self._why_unknown(), row.key)
        if all(_is_taken(place, prompt.spans) for place in _places(text, prompt.text)):
            detail = "Other chunks take its place in the prompt, which they cover better."
            return _verdict(text, Outcome.OVERLAP, detail, row.key)
        return _verdict(text, Outcome.NOT_INGESTED, "It was not stored yet when the prompt was planned.", row.key)

    def _not_stored(self, text: str) -> Verdict:
        """Say why nothing is stored for a text."""
        key = self._judge.key_of(text)
        known = None if key is None else self._told.get(key)
        known = known or self._judge.gone(text, key) or self._judge.elsewhere(text, operator=self._operator)
        known = known or self._judge.too_long(text) or self._like(text)
        return known or _verdict(text, Outcome.NOT_INGESTED, "Nothing is stored for it.")

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
        for row in self._judge.like(text):
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


def _verdict(text: str, outcome: Outcome, detail: str, key: str | None = None) -> Verdict:
    return Verdict.of(text, outcome, detail, remedy_of(outcome), chunk_id=key)


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
