"""Namespaces: for which models, dtypes and templates a store holds KV, as far as somebody may know it.

Of an identity everything but the tenant is written down. Whoever has a tenant's name can tell by the digest which
namespaces are that tenant's; nobody can read a tenant's name from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from fused_kv_llm.chunk import ContentHash, KVIdentity
from fused_kv_llm.errors import StoreFullError
from fused_kv_llm.store.parts import StoreParts

__all__ = ["Namespaces"]

_PREFIX = "namespace:"


class Namespaces:
    """The identities that a store holds KV of, ``KVStore.namespaces``; encrypted where the store is.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def add(self, identity: KVIdentity) -> None:
        """Write down what an identity is made of, without its tenant; does nothing in a read-only store."""
        self._parts.check_open()
        if self._parts.read_only:
            return
        fields = asdict(identity)
        del fields["tenant"]
        # A store without room for it can still be read.
        with suppress(StoreFullError):
            self._parts.index.records.add(_PREFIX + identity.digest, json.dumps(fields, sort_keys=True).encode())

    def of_tenant(self, tenant: str) -> list[KVIdentity]:
        """Return the identities of one tenant, those of earlier releases' engines left out."""
        return [identity for digest, identity in self._known(tenant) if identity.digest == digest]

    def of_others(self, tenant: str) -> list[str]:
        """Return the digests of identities of other tenants: for whoever may know of all of them."""
        return [digest for digest, identity in self._known(tenant) if identity.digest != digest]

    def holding(self, content: ContentHash, identities: Sequence[str]) -> set[str]:
        """Return those of some identities, given by their digests, that have a chunk with these hashes of its text."""
        self._parts.check_open()
        return self._parts.index.holding(content, identities)

    def names(self) -> dict[str, str]:
        """Return what people call the identities, by digest."""
        self._parts.check_open()
        return self._parts.index.ledger.descriptions()

    def _known(self, tenant: str) -> list[tuple[str, KVIdentity]]:
        self._parts.check_open()
        known = []
        for name in self._parts.index.records.names(_PREFIX):
            # A record that is damaged, or of another release, says nothing.
            with suppress(ValueError, TypeError):
                data = self._parts.index.records.read(name)
                if data is not None:
                    known.append((name.removeprefix(_PREFIX), KVIdentity(**json.loads(data), tenant=tenant)))
        return known
