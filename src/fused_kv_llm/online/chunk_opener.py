"""Opening the stored KV of a prompt's chunks, and saying why a chunk could not be opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.report import Outcome
from fused_kv_llm.store import KVStore, StoredKV, open_replacement

__all__ = ["ChunkOpener"]

_log = logging.getLogger(__name__)

_WHY_GONE = {
    "damaged": (Outcome.DAMAGED, "Its file could not be used, and was put away."),
    "evicted": (Outcome.EVICTED, "It made room for other chunks while the prompt was planned."),
    "deleted": (Outcome.DELETED, "It was deleted while the prompt was planned."),
}


class ChunkOpener:
    """Opens chunks of one identity.

    Parameters
    ----------
    store : KVStore
    identity : str
        Only KV of this identity is used.
    replacement : str or None
        Name of the KV that is used in place of chunks' own, where they have it, see :func:`.open_replacement`.
    """

    def __init__(self, store: KVStore, identity: str, replacement: str | None = None) -> None:
        self._store, self._identity, self._replacement = store, identity, replacement

    def open(self, key: str, token_ids: Sequence[int], *, counted: bool) -> StoredKV | None:
        """Return a chunk's KV, open, or None if it is not there or cannot be used.

        Parameters
        ----------
        key : str
        token_ids : sequence of int
            The chunk's stand-alone ids, as the index has them.
        counted : bool
            Whether the chunk is used, for hit rates and policies, see :meth:`.KVStore.open`.
        """
        try:
            stored = self._store.open(key, token_ids, counted=counted)
        except StoreUnavailableError as error:
            _log.warning("The store cannot be used now, so a chunk is computed: %s", error)
            return None
        if stored is None:
            return None
        if stored.identity == self._identity:
            return stored if self._replacement is None else self._replaced(stored, self._replacement)
        # The file's checksummed header outranks the index, which could have been altered by hand.
        stored.close()
        self._store.discard(key, "its file holds the KV of another model or configuration")
        return None

    def why_missing(self, key: str) -> tuple[Outcome, str]:
        """Return why a chunk that was found could not be opened."""
        unknown = (Outcome.NOT_LOADED, "Its KV is stored, and could not be read.")
        try:
            return _WHY_GONE.get(self._store.departures([key]).get(key, ""), unknown)
        except StoreUnavailableError:
            return unknown

    def _replaced(self, stored: StoredKV, name: str) -> StoredKV:
        try:
            return open_replacement(self._store.sidecars, stored, name)
        except BaseException:
            stored.close()
            raise
