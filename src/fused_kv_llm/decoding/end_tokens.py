"""The tokens that end an answer."""

from __future__ import annotations

from typing import Any

from fused_kv_llm.model import LoadedModel

__all__ = ["end_token_ids"]


def end_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the ids that end an answer: the generation config's and the tokenizer's."""
    configured: Any = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    ids = set(configured if isinstance(configured, (list, tuple)) else [configured])
    ids.add(loaded.tokenizer.eos_token_id)
    return frozenset(int(i) for i in ids if i is not None)
