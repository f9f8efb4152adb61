"""How many bytes a tenant's documents take in the store, and how many they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.store import stored_bytes_per_token

from .libraries import Libraries
from .library_schema import Owner
from .quotas import Quota
from .refusals import RefusedError

__all__ = ["StoredBytes", "bytes_per_token", "identities_of", "stored_bytes_of"]


class StoredBytes:
    """Bounds what tenants store; thread-safe.

    Parameters
    ----------
    libraries : Libraries
    quotas : mapping of str to Quota
        By tenant; who asks without a key is ``default``.
    on_refused : callable
        Called with the tenant and ``stored_bytes`` whenever something is refused.
    """

    def __init__(
        self,
        libraries: Libraries,
        quotas: Mapping[str, Quota],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._libraries, self._on_refused = libraries, on_refused
        self._most = {tenant: quota.stored_bytes for tenant, quota in quotas.items()}

    def check(self, engine: FusedKVEngine, owner: Owner, texts: Sequence[str] = (), nbytes: int = 0) -> None:
        """Make sure that a tenant may store the KV of further texts, or a further document.

        Parameters
        ----------
        engine : FusedKVEngine
            The owner's.
        owner : Owner
            What a tenant's clients keep apart counts together.
        texts : sequence of str
            Those that are stored already take nothing more.
        nbytes : int
            Of the document.

        Raises
        ------
        RefusedError
            If that is more than its quota.
        """
        tenant = owner.tenant or "default"
        most = self._most.get(tenant)
        if most is None:
            return
        new = [text for text, key in zip(texts, engine.corpus.keys_of(texts), strict=True) if key is None]
        tokens, taken = sum(len(engine.token_ids(text)) for text in new), self._taken(engine, owner.tenant)
        wanted = tokens * bytes_per_token(engine) + nbytes
        if taken + wanted > most or (not texts and taken >= most):
            self._on_refused(tenant, "stored_bytes")
            raise RefusedError(
                f"Your documents take {taken / 1e6:.1f} MB with their KV, and this would take {wanted / 1e6:.1f} MB "
                f"more: you may store {most / 1e6:.1f} MB. Delete documents to make room.",
                429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )

    def _taken(self, engine: FusedKVEngine, tenant: str) -> int:
        return stored_bytes_of(engine, self._libraries.names(tenant)) + self._libraries.document_bytes(tenant)


def identities_of(engine: FusedKVEngine, names: Iterable[str]) -> set[str]:
    """Return digests of the identities under some names of tenants, as their engines have them."""
    return {one.digest for name in names for one in engine.store.namespaces.of_tenant(name)}


def stored_bytes_of(engine: FusedKVEngine, names: Iterable[str]) -> int:
    """Return the bytes of KV on disk and beyond that are stored under some names of tenants."""
    own = identities_of(engine, names)
    rows = [row for row in engine.store.stats().identities if row.identity in own]
    return sum(row.disk_bytes + row.remote_bytes for row in rows)


def bytes_per_token(engine: FusedKVEngine) -> int:
    """Return the bytes that a token's KV takes in the store, with what preprocessing adds."""
    geometry, stored = engine.loaded.geometry, engine.store.kv_dtype
    storage = str(engine.loaded.dtype).removeprefix("torch.") if stored == "auto" else stored
    shape = geometry.num_layers, *geometry.room
    plain = stored_bytes_per_token(storage, *shape)
    added = {"none": 0, "similar": stored_bytes_per_token("int8", *shape), "fusionrag": plain}
    return plain + added[engine.config.preprocessing]
