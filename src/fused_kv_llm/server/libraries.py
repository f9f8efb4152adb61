"""The libraries of all tenants: opened when they are needed, swept of what has expired."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fused_kv_llm.engine import FusedKVEngine

from .library import Library, owner_of, owner_of_expired
from .refusals import RefusedError
from .tenants import Tenants

__all__ = ["Libraries", "Owner", "pin_document"]

_FOLDER = "documents"


class Owner(NamedTuple):
    """Whose documents: the tenant of the key, and the further name that its client gave."""

    tenant: str
    apart: str | None


def pin_document(engine: FusedKVEngine, library: Library, document: str) -> None:
    """Keep what is stored of a document's chunks from being evicted."""
    keys = engine.corpus.keys_of([chunk.text for chunk in library.chunks(document)])
    engine.store.pin([key for key in keys if key is not None], document)


class Libraries:
    """The library of each tenant, in a folder of the store; thread-safe.

    Parameters
    ----------
    tenants : Tenants
    clock : callable
        Seconds since 1970.
    """

    def __init__(self, tenants: Tenants, clock: Callable[[], float] = time.time) -> None:
        self._tenants, self._clock = tenants, clock
        self._lock = threading.Lock()
        self._open: dict[str, Library] = {}

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return Path(self._tenants.default.store.kv_dir) / _FOLDER

    def of(self, engine: FusedKVEngine, owner: Owner) -> Library:
        """Return the library of a tenant.

        Parameters
        ----------
        engine : FusedKVEngine
            The tenant's.
        owner : Owner
            Remembered in the file, so that what has expired can be swept after a restart.

        Raises
        ------
        RefusedError
            If it cannot be opened.
        """
        name = engine.config.tenant
        with self._lock:
            if name not in self._open:
                if engine.store.is_encrypted:
                    message = "Documents would be kept in the clear beside an encrypted store, so none are taken"
                    raise RefusedError(message, 501, code="not_supported")
                self.folder.mkdir(mode=0o700, exist_ok=True)
                # Names of tenants come from clients too, and are no paths.
                path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.sqlite"
                library = Library(path, self._clock)
                library.about(owner.tenant, owner.apart)
                self._open[name] = library
            return self._open[name]

    def remove(self, engine: FusedKVEngine, library: Library, document: str) -> bool:
        """Delete a document with the KV that only it has; whether it was there."""
        texts = library.remove(document)
        engine.store.unpin(document)
        if texts:
            engine.delete_chunks(texts)
        return texts is not None

    def sweep(self) -> int:
        """Delete what has expired, of all tenants; return how many documents that were."""
        self._open_expired()
        with self._lock:
            found = list(self._open.values())
        swept = 0
        for library in found:
            gone = library.expired()
            if gone:
                with self._tenants.using(*library.owner()) as engine:
                    swept += sum(self.remove(engine, library, document) for document in gone)
        return swept

    def _open_expired(self) -> None:
        """Open the libraries that nobody has asked for since the server began and that have something to sweep."""
        with self._lock:
            known = {library.path for library in self._open.values()}
        for path in self.folder.glob("*.sqlite"):
            owner = None if path in known else owner_of_expired(path, self._clock())
            if owner is not None:
                with self._tenants.using(*owner) as engine:
                    self.of(engine, Owner(*owner))

    def owners(self) -> list[Owner]:
        """Return everybody who has a library, in this process or on the disk."""
        with self._lock:
            found = {library.path: Owner(*library.owner()) for library in self._open.values()}
        for path in self.folder.glob("*.sqlite"):
            owner = None if path in found else owner_of(path)
            if owner is not None:
                found[path] = Owner(*owner)
        return list(found.values())

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            found, self._open = list(self._open.values()), {}
        for library in found:
            library.close()
