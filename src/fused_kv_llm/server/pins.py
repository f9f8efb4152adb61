"""Pinned documents: their KV is not evicted, and nobody's pins take the disk from the others."""

from __future__ import annotations

import threading

from fused_kv_llm.engine import FusedKVEngine

from .libraries import Libraries
from .library import Library
from .library_schema import Owner
from .refusals import RefusedError
from .stored_bytes import identities_of

__all__ = ["Pins"]


class Pins:
    """Pins documents; thread-safe.

    Parameters
    ----------
    libraries : Libraries
    share : float
        The part of the store's ``disk_bytes`` that the pinned documents of one tenant may take.
    """

    def __init__(self, libraries: Libraries, share: float) -> None:
        self._libraries, self._share = libraries, share
        # Whoever pins again what is pinned must not undo that it is unpinned meanwhile.
        self._lock = threading.Lock()

    def pin(self, engine: FusedKVEngine, owner: Owner, library: Library, document: str) -> None:
        """Keep what is stored of a document's chunks from being evicted.

        Raises
        ------
        RefusedError
            If the tenant's pinned documents would take more than they may.
        """
        with self._lock:
            self._check_room(engine, owner, self._keys(engine, library, document))
            self._pin(engine, library, document)

    def pin_again(self, engine: FusedKVEngine, library: Library, document: str) -> None:
        """Pin what was stored again, if the document is pinned."""
        with self._lock:
            if document in engine.store.pins.holders():
                self._pin(engine, library, document)

    def unpin(self, engine: FusedKVEngine, document: str) -> None:
        """Let a document's KV be evicted again."""
        with self._lock:
            engine.store.pins.remove(document)

    def _pin(self, engine: FusedKVEngine, library: Library, document: str) -> None:
        engine.store.pins.add(self._keys(engine, library, document), document)
        if library.document(document) is None:
            # It was deleted meanwhile, and unpinned perhaps before it was pinned here.
            engine.store.pins.remove(document)

    @staticmethod
    def _keys(engine: FusedKVEngine, library: Library, document: str) -> list[str]:
        keys = engine.corpus.keys_of([chunk.text for chunk in library.chunks(document)])
        return [key for key in keys if key is not None]

    def _check_room(self, engine: FusedKVEngine, owner: Owner, keys: list[str]) -> None:
        budget = engine.store.stats().disk_bytes
        if budget is None:
            # Nothing is evicted, so pins take nothing from anybody.
            return
        most = int(budget * self._share)
        taken = engine.store.pins.nbytes(identities_of(engine, self._libraries.names(owner.tenant)), keys)
        if taken > most:
            raise RefusedError(
                f"With this document your pinned ones would take {taken / 1e6:.1f} MB: they may take "
                f"{most / 1e6:.1f} MB. Unpin others first.",
                429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )
