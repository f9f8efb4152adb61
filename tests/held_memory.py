"""What the requests of an engine hold of its memory."""

from __future__ import annotations

import gc

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model.cache import FusedCache


def caches_in_use(engine: FusedKVEngine) -> list[FusedCache]:
    """Return the caches of an engine that have memory; those that other tests of the process left are not its own."""
    pool = engine.requests.context.pool
    caches = [thing for thing in gc.get_objects() if type(thing) is FusedCache and thing._pool is pool]
    return [cache for cache in caches if cache._buffer is not None]
