"""Running a model through the seam: rows in, hidden states or logits out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.decoder_stack import may_pause
from fused_kv_llm.model.forward_pass import ForwardPass, KVPass
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.narrowing import NarrowingPass
from fused_kv_llm.model.numbers import check_logits
from fused_kv_llm.model.pausing import Pausing
from fused_kv_llm.model.seam import run_decoder, run_model

__all__ = ["PrefixKV", "compute_prefix", "forward_kv", "forward_rows", "pause_at"]


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

    Raises
    ------
    ConfigError, UnsupportedModelError
        If the model's attention was exchanged after loading, or is not causal any more.
    """
    check_attached(loaded.model, loaded.model_id)
    run_decoder(loaded.model, ids, positions, cache, forward_pass)


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

    Raises
    ------
    ConfigError, UnsupportedModelError
        As :func:`forward_kv`; and if a logit is not a number.
    """
    check_attached(loaded.model, loaded.model_id)
    logits = run_model(loaded.model, ids, positions, cache, forward_pass)[0].float()
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    check_logits(logits, layers, loaded.model_id, loaded.dtype, forward_pass.rows)
    return logits


def pause_at(loaded: LoadedModel, forward_pass: ForwardPass, at_s: float) -> None:
    """Have a forward end with :class:`.PausedError` when its time is over, if the model's layers allow it.

    Parameters
    ----------
    loaded : LoadedModel
    forward_pass : ForwardPass
        It may have been left before; it goes on then, or begins anew if somebody has changed a layer meanwhile.
    at_s : float
        See :class:`.Pausing`.
    """
    if forward_pass.pausing is None and at_s == float("inf"):
        return
    if isinstance(forward_pass, NarrowingPass) or not may_pause(loaded.model.get_decoder()):
        forward_pass.pausing = None
        return
    forward_pass.pausing = forward_pass.pausing or Pausing()
    forward_pass.pausing.at_s = at_s


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Exact KV of the token ids that every prompt begins with.

    Parameters
    ----------
    token_ids : tuple of int
        ``P`` ids; may be empty.
    keys, values : Tensor
        ``[L, Hkv, P, D]`` and ``[L, Hkv, P, Dv]``.
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
    if not token_ids:
        heads, *dims = geometry.room
        return PrefixKV((), *(
            torch.empty(geometry.num_layers, heads, 0, dim, dtype=loaded.dtype, device=loaded.device) for dim in dims
        ))  # fmt: skip
    positions = torch.arange(len(token_ids), device=loaded.device)
    cache = BatchCache(geometry.num_layers, geometry.room, swaps=geometry.swaps)
    with torch.inference_mode():
        forward_pass = KVPass(positions, len(token_ids), geometry.num_layers - 1)
        forward_kv(loaded, torch.tensor([token_ids], device=loaded.device), positions, cache, forward_pass)
        keys, values = cache.chunk(0, slice(0, len(token_ids)))
    return PrefixKV(token_ids, keys, values)
