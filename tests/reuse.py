"""How much of what was retrieved came from stored KV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fused_kv_llm import FusedKVEngine


def reused_share(engine: FusedKVEngine, report: Mapping[str, Any], texts: Iterable[str]) -> float:
    """Return reused tokens over the tokens of the retrieved texts, for requests of ratio 0."""
    assert report["recompute_ratio"] == 0
    return float(report["reused_tokens"] / sum(len(engine.token_ids(text.strip())) for text in texts))
