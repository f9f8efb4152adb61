"""The remote tier: chunks in Redis, S3 or another file system that fsspec knows."""

from __future__ import annotations

from fused_kv_llm.store.remote.headers import read_headers
from fused_kv_llm.store.remote.tier import RemoteTier, open_remote
from fused_kv_llm.store.remote.url import public_url

__all__ = [
    "RemoteTier",
    "open_remote",
    "public_url",
    "read_headers",
]
