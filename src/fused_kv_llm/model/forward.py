"""Running a model through the seam: rows in, hidden states or logits out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model.attention import ATTENTION_NAME, no_mask
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.pass_context import ForwardPass, KVPass, StopForwardError, running

__all__ = ["PrefixKV", "compute_prefix", "forward_kv", "forward_rows"]


def _inputs(loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache) -> dict[str, object]:
    chosen = loaded.model.config._attn_implementation
    if chosen != ATTENTION_NAME:
        raise ConfigError(
            f"The attention of {loaded.model_id!r} was set to {chosen!r} after it was loaded: fused passes need "
            f"{ATTENTION_NAME!r}. Set it back with model.set_attn_implementation({ATTENTION_NAME!r})."
        )
    return {
        "input_ids": ids,
        "position_ids": positions[None].expand(ids.shape[0], -1),
        "past_key_values": cache,
        "use_cache": True,
        "attention_mask": no_mask(loaded.device),
    }


def forward_kv(loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache, forward_pass: ForwardPass) -> None:
    """Run the decoder, without its output head, until the pass ends it.

    Parameters
    ----------
    loaded : LoadedModel
    ids : Tensor
        int64 ``[B, R]``.
    positions : Tensor
        int64 ``[R]``: what the rows' rotation is of.
    cache : Cache
        Receives the keys and values.
    forward_pass : ForwardPass
        Raises :class:`StopForwardError` when it has what it needs.
    """
    with running(forward_pass), contextlib.suppress(StopForwardError):
        loaded.model.get_decoder()(**_inputs(loaded, ids, positions, cache))


def forward_rows(
    loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache, forward_pass: ForwardPass
) -> Tensor:
    """Run the model and return logits.

    Parameters
    ----------
    loaded, ids, positions, cache, forward_pass
        As :func:`forward_kv` takes them.

    Returns
    -------
    Tensor
        float32 ``[R, vocabulary]``; of the last row only, ``[1, vocabulary]``, where the pass has a final layer.
    """
    keep = 0 if forward_pass.final_layer is None else 1
    with running(forward_pass):
        output = loaded.model(**_inputs(loaded, ids, positions, cache), logits_to_keep=keep)
    logits: Tensor = output.logits
    return logits[0].float()


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Exact KV of the token ids that every prompt begins with.

    Parameters
    ----------
    token_ids : tuple of int
        ``P`` ids; may be empty.
    keys, values : Tensor
        ``[L, Hkv, P, D]``.
    """

    token_ids: tuple[int, ...]
    keys: Tensor
    values: Tensor


def compute_prefix(loaded: LoadedModel, token_ids: tuple[int, ...]) -> PrefixKV:
    """Prefill the ids that every prompt begins with.

    Parameters
    ----------
    loaded : LoadedModel
    token_ids : tuple of int

    Returns
    -------
    PrefixKV
    """
    geometry = loaded.geometry
    shape = (geometry.num_layers, geometry.num_kv_heads, 0, geometry.head_dim)
    empty = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)
    if not token_ids:
        return PrefixKV((), empty, empty)
    positions = torch.arange(len(token_ids), device=loaded.device)
    cache = BatchCache(empty, empty)
    with torch.inference_mode():
        forward_pass = KVPass(positions, len(token_ids), geometry.num_layers - 1)
        forward_kv(loaded, torch.tensor([token_ids], device=loaded.device), positions, cache, forward_pass)
        keys, values = cache.chunk(0, len(token_ids))
    return PrefixKV(token_ids, keys, values)
