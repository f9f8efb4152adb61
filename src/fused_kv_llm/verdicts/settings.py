"""Names of what differs between two identities."""

from __future__ import annotations

from fused_kv_llm.chunk import KVIdentity

__all__ = ["setting_names"]

_NAMES = {
    "model": "model",
    "tokenizer": "tokenizer",
    "dtype": "dtype",
    "rope": "rotary embedding",
    "prefix": "chat template",
    "preprocessing": "preprocessing",
    "kv_dtype": "kv_dtype",
    "format_version": "storage format",
}


def setting_names(one: KVIdentity, other: KVIdentity) -> str:
    """Return what two identities differ in, in words."""
    return " and ".join(name for field, name in _NAMES.items() if getattr(one, field) != getattr(other, field))
