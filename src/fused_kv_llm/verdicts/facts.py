"""What the store knows of one chunk by itself, whatever prompt it was expected in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity, chunk_key
from fused_kv_llm.prompt import WINDOW, content_hash, is_indexable
from fused_kv_llm.report import Outcome, Verdict
from fused_kv_llm.store import ChunkRow, KVStore

from .remedies import verdict_of
from .settings import setting_names

__all__ = ["ChunkFacts"]

_MOST_ENCODED_CHARS = 100_000
_GONE = {
    "evicted": (Outcome.EVICTED, "Its KV was stored, and made room for other chunks."),
    "deleted": (Outcome.DELETED, "Its KV was stored, and was deleted."),
    "damaged": (Outcome.DAMAGED, "Its file could not be used, and was put away."),
}


class ChunkFacts:
    """Answers one question about a chunk each; thread-safe.

    Parameters
    ----------
    store, catalog, identity, encode, min_tokens, room
        As :class:`.Judge` takes them.
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

    def key_of(self, text: str) -> str | None:
        """Return the key that a chunk's KV has, or would have; None for a text too long to be looked at."""
        if len(text) > _MOST_ENCODED_CHARS:
            return None
        return chunk_key(self._identity.digest, self._encode(text))

    def stored(self, row: ChunkRow) -> Verdict:
        """Say of a chunk that is stored whether it can be read."""
        if len(row.token_ids) < self._min_tokens:
            return verdict_of(
                row.text, Outcome.TOO_SHORT, f"It has {len(row.token_ids)} tokens, {self._min_tokens} are needed."
            )
        found = self._store.open(row.key, row.token_ids, counted=False)
        if found is not None:
            right = found.identity == self._identity.digest
            found.close()
            if right:
                tokens = len(row.token_ids)
                return verdict_of(
                    row.text, Outcome.REUSABLE, f"Its {tokens} tokens are stored.", row.key, tokens=tokens
                )
        return self.gone(row.text, row.key) or verdict_of(
            row.text, Outcome.NOT_LOADED, "Its KV is stored, and could not be read just now.", row.key
        )

    def gone(self, text: str, key: str | None) -> Verdict | None:
        """Say why a chunk is not stored any more; None if it never was, as far as that is known."""
        why = None if key is None else self._store.departures([key]).get(key)
        if why is None:
            return None
        outcome, detail = _GONE[why]
        return verdict_of(text, outcome, detail, key)

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
            return verdict_of(text, Outcome.OTHER_SETTINGS, detail)
        if operator and namespaces.holding(content, namespaces.of_others(tenant)):
            return verdict_of(text, Outcome.OTHER_TENANT, "Another tenant has stored it.")
        return None

    def like(self, text: str) -> list[ChunkRow]:
        """Return stored chunks that may be the text in another form."""
        return self._catalog.rows_like(text)

    def too_short(self, text: str) -> Verdict | None:
        """Say of a text that it is too short to be stored."""
        if is_indexable(text):
            return None
        return verdict_of(text, Outcome.TOO_SHORT, f"It has {len(text)} characters, {WINDOW} are needed.")

    def too_long(self, text: str) -> Verdict | None:
        """Say of a text that it does not fit the model's context."""
        if len(text) > _MOST_ENCODED_CHARS or len(self._encode(text)) <= self._room:
            return None
        return verdict_of(text, Outcome.TOO_LONG, f"It has more than the {self._room} tokens that a chunk may have.")
