"""How long a prompt may be: a model's context, within one regime of its rotation and its queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fused_kv_llm.errors import UnsupportedModelError

__all__ = ["context_length"]

# Their frequencies change once a prompt is longer than the original context; keys of both kinds do not mix.
_CHANGING = ("longrope", "dynamic")
# Queries that stand behind the original context are scaled, so what layers make of a chunk depends on its place.
_SCALES_QUERIES = "llama_4_scaling_beta"


def context_length(config: Any, model_id: str) -> int:
    """Return the longest prompt plus answer, in tokens.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        Of the text model.
    model_id : str
        For messages.

    Returns
    -------
    int
        At most the original context where the rotation changes beyond it (LongRoPE, dynamic NTK), or queries are
        scaled beyond it (Ministral 3).

    Raises
    ------
    UnsupportedModelError
        If the configuration does not say it.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: max_position_embeddings={length!r} in its configuration is not "
            "the length of a context."
        )
    for rope in _parameters(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in _CHANGING or rope.get(_SCALES_QUERIES):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or length
            length = min(length, int(original))
    return length


def _parameters(rope: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every rotation: one for all layers, or one for each kind of layer."""
    if isinstance(rope, dict):
        if "rope_type" in rope:
            yield rope
        for part in rope.values():
            yield from _parameters(part)
