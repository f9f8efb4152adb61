"""The libraries of all tenants: open while they are needed, swept of what has expired."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fused_kv_llm.engine import FusedKVEngine

from .closed_library import document_bytes_of, owner_of, owner_of_expired
from .library import Library
from .library_schema import Owner
from .refusals import RefusedError
from .tenants import Tenants

__all__ = ["Libraries"]

_FOLDER = "documents"


class Libraries:
    """The library of each tenant, in a folder of the store; thread-safe.

    Parameters
    ----------
    tenants : Tenants
    max_open : int
        Most libraries that are open at once. Those with jobs that have not ended stay open.
    max_names : int
        Most names below one tenant that have a library.
    clock : callable
        Seconds since 1970.
    """

    def __init__(self, tenants: Tenants, max_open: int, max_names: int, clock: Callable[[], float] = time.time) -> None:
        self._tenants, self._max_open, self._max_names, self._clock = tenants, max_open, max_names, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, Library] = OrderedDict()
        self._users: Counter[Library] = Counter()
        self._owners: dict[Path, Owner] = {}
        # Of closed libraries; nobody else changes them.
        self._document_bytes: dict[Path, int] = {}

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return Path(self._tenants.default.store.kv_dir) / _FOLDER

    @contextmanager
    def using(self, engine: FusedKVEngine, owner: Owner, *, make: bool = False) -> Iterator[Library]:
        """Keep the library of a tenant open for as long as it is needed.

        Parameters
        ----------
        engine : FusedKVEngine
            The tenant's.
        owner : Owner
            Remembered in the file, so that what has expired can be swept after a restart.
        make : bool
            Make the library if there is none. Otherwise an empty one is given, of which nothing is kept.

        Raises
        ------
        RefusedError
            If it cannot be opened.
        """
        # Names of tenants come from clients too, and are no paths.
        path = self.folder / f"{hashlib.sha256(engine.config.tenant.encode()).hexdigest()[:32]}.sqlite"
        with self._lock:
            there = make or path in self._open or path.exists()
            library = self._opened(engine, path, owner) if there else Library(None, self._clock)
            self._users[library] += 1
        try:
            yield library
        finally:
            with self._lock:
                self._users[library] -= 1
                if not self._users[library]:
                    del self._users[library]
            if not there:
                library.close()

    def remove(self, engine: FusedKVEngine, library: Library, document: str) -> bool:
        """Delete a document with the KV that only it has; whether it was there."""
        # Before, so that a process that is killed leaves no pin without a document; and behind whoever pinned it since.
        engine.store.pins.remove(document)
        texts = library.remove(document)
        engine.store.pins.remove(document)
        if texts:
            engine.delete_chunks(texts)
        return texts is not None

    def sweep(self) -> int:
        """Delete what has expired, of all tenants; return how many documents that were."""
        now_s, swept = self._clock(), 0
        for path in self.folder.glob("*.sqlite"):
            owner = owner_of_expired(path, now_s)
            if owner is not None:
                with self._tenants.using(*owner) as engine, self.using(engine, owner) as library:
                    swept += sum(self.remove(engine, library, document) for document in library.expired())
        return swept

    def owners(self) -> list[Owner]:
        """Return everybody who has a library, open or not."""
        with self._lock:
            return list(self._known_owners().values())

    def names(self, tenant: str) -> set[str]:
        """Return the names of a tenant's engines that have documents: its own, and those that its clients gave."""
        return {self._tenants.name(*owner) for owner in self.owners() if owner.tenant == tenant}

    def document_bytes(self, tenant: str) -> int:
        """Return how many bytes a tenant's documents had when they were uploaded."""
        with self._lock:
            return sum(self._bytes_of(path) for path, owner in self._known_owners().items() if owner.tenant == tenant)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            found, self._open = list(self._open.values()), OrderedDict()
        for library in found:
            library.close()

    # -- with the lock ---------------------------------------------------------------------------------------

    def _opened(self, engine: FusedKVEngine, path: Path, owner: Owner) -> Library:
        if path not in self._open:
            if engine.store.is_encrypted:
                message = "Documents would be kept in the clear beside an encrypted store, so none are taken"
                raise RefusedError(message, 501, code="not_supported")
            if not path.exists():
                self._check_name(owner)
            self._make_way()
            self.folder.mkdir(mode=0o700, exist_ok=True)
            library = Library(path, self._clock)
            library.about(owner)
            self._open[path], self._owners[path] = library, owner
            self._document_bytes.pop(path, None)
        self._open.move_to_end(path)
        return self._open[path]

    def _check_name(self, owner: Owner) -> None:
        names = sum(other.tenant == owner.tenant and other.apart is not None for other in self._known_owners().values())
        if owner.apart is not None and names >= self._max_names:
            raise RefusedError(
                f"There are documents under {self._max_names} names (tenant=...) already, and no more are allowed",
                429,
                kind="insufficient_quota",
                code="insufficient_quota",
                param="tenant",
            )

    def _make_way(self) -> None:
        for path, library in list(self._open.items()):
            if len(self._open) < self._max_open:
                return
            if library not in self._users and not library.has_open_jobs():
                self._document_bytes[path] = library.document_bytes()
                self._open.pop(path).close()
        if len(self._open) >= self._max_open:
            raise RefusedError(
                "The documents of too many tenants are in use; try again later", 503, kind="server_error"
            )

    def _bytes_of(self, path: Path) -> int:
        if path in self._open:
            return self._open[path].document_bytes()
        if path not in self._document_bytes:
            self._document_bytes[path] = document_bytes_of(path)
        return self._document_bytes[path]

    def _known_owners(self) -> dict[Path, Owner]:
        for path in self.folder.glob("*.sqlite"):
            owner = None if path in self._owners else owner_of(path)
            if owner is not None:
                self._owners[path] = owner
        return self._owners
