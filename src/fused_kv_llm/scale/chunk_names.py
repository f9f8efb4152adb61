"""64-bit names by which gateways, routers and replicas speak of chunks and conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["chunk_name", "conversation_names"]

_MASK = 2**64 - 1


def chunk_name(full: int, tenant: str) -> int:
    """Return the name of a chunk: equal texts of two tenants have different KV, and so different names.

    Parameters
    ----------
    full : int
        ``ContentHash.full`` of its text.
    tenant : str
        What the tenant is called below the server's own, empty for that.
    """
    return (full ^ _salt(tenant)) & _MASK


def conversation_names(messages: Iterable[tuple[str, str]], tenant: str) -> list[int]:
    """Return a name for a conversation up to and with each of its messages.

    Parameters
    ----------
    messages : iterable of tuple of str
        Role and text.
    tenant : str
    """
    digest, names = hashlib.blake2b(_bytes(tenant), digest_size=8), []
    for role, text in messages:
        content = _bytes(text)
        digest.update(_bytes(f"\0{role}\0{len(content)}\0") + content)
        names.append(int.from_bytes(digest.digest(), "little"))
    return names


@lru_cache(1024)
def _salt(tenant: str) -> int:
    return int.from_bytes(hashlib.blake2b(_bytes(tenant), digest_size=8).digest(), "little") if tenant else 0


def _bytes(text: str) -> bytes:
    """Encode a text of a request's body, which may have half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")
