"""The engines of the tenants: one model and one store, chunks and prefixes apart."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from fused_kv_llm.engine import FusedKVEngine

from .refusals import RefusedError

__all__ = ["Tenants", "name_below"]


def name_below(tenant: str, apart: str | None = None) -> str:
    """Return what a tenant is called below the server's own; arguments as those of :meth:`Tenants.using`."""
    # A client cannot write the separator, and so not the name of another tenant.
    parts = [part.replace("%", "%25").replace("/", "%2F") for part in (tenant, apart or "")]
    return "/".join(part for part in parts if part)


class Tenants:
    """Opens the engine of each tenant when it is first needed; thread-safe.

    Engines of one model share its step loop, so that requests of all tenants are batched together and take turns.

    Parameters
    ----------
    engine : FusedKVEngine
        Of those who have no tenant; its model and options are the others' too. It is not closed here.
    max_open : int
        Most engines besides. The one that was not used for longest makes room: its store is closed, nothing is lost.
    """

    def __init__(self, engine: FusedKVEngine, max_open: int) -> None:
        self.default = engine
        self._max_open = max_open
        # The first is held while an engine is opened or closed; whoever has done with one waits for the second only.
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._engines: OrderedDict[str, FusedKVEngine] = OrderedDict()
        self._users: Counter[str] = Counter()

    @contextmanager
    def using(self, tenant: str, apart: str | None = None) -> Iterator[FusedKVEngine]:
        """Keep the engine of a tenant open for as long as a request needs it.

        Parameters
        ----------
        tenant : str
            Empty for the server's own.
        apart : str or None
            A further name that a tenant's client gave, which leads nowhere but below that tenant.

        Raises
        ------
        RefusedError
            If the engines of other tenants are all in use.
        StoreUnavailableError
            If its store cannot be opened.
        """
        name = self.name(tenant, apart)
        with self._lock:
            engine = self.default if name == self.default.config.tenant else self._opened(name)
            with self._counting:
                self._users[name] += 1
        try:
            yield engine
        finally:
            with self._counting:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name]

    def name(self, tenant: str, apart: str | None = None) -> str:
        """Return what the engine of a tenant calls it; arguments as those of :meth:`using`."""
        return "/".join(part for part in (self.default.config.tenant, name_below(tenant, apart)) if part)

    def engines(self) -> list[FusedKVEngine]:
        """Return all that are open."""
        with self._lock:
            return [self.default, *self._engines.values()]

    def close(self) -> None:
        """Close what was opened here."""
        with self._lock:
            engines, self._engines = list(self._engines.values()), OrderedDict()
        for engine in engines:
            engine.close()

    def _opened(self, name: str) -> FusedKVEngine:
        if name not in self._engines:
            self._make_way()
            options = {key: value for key, value in self.default.config if key not in ("model", "tenant")}
            self._engines[name] = FusedKVEngine(self.default.loaded, **options, tenant=name)
        self._engines.move_to_end(name)
        return self._engines[name]

    def _make_way(self) -> None:
        if len(self._engines) < self._max_open:
            return
        idle = next((name for name in self._engines if not self._users[name]), None)
        if idle is None:
            raise RefusedError("Too many tenants are being answered; try again later", 503, kind="server_error")
        self._engines.pop(idle).close()
