"""Running a model through the seam: rows in, hidden states or logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.attention import check_attached
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.pass_context import ForwardPass, KVPass
from fused_kv_llm.model.seam import run_decoder, run_model

__all__ = ["PrefixKV", "check_numbers", "compute_prefix", "forward_kv", "forward_rows"]


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
    if bool(logits.isnan().any()):
        check_numbers(loaded, [(layer.keys, layer.values) for layer in cache.layers], forward_pass.rows)
        raise _not_a_number(loaded, "its output: the keys and values of all layers are numbers")
    return logits


def check_numbers(loaded: LoadedModel, layers: Sequence[tuple[Tensor, Tensor]], rows: Tensor | None = None) -> None:
    """Make sure that keys and values are numbers.

    Parameters
    ----------
    loaded : LoadedModel
    layers : sequence of (Tensor, Tensor)
        Keys and values ``[..., N, D]`` by layer.
    rows : Tensor or None
        int64: which of the ``N`` to look at; None for all.

    Raises
    ------
    UnsupportedModelError
        If one is not; it names the layer.
    """
    for number, pair in enumerate(layers):
        for part in pair:
            seen = part if rows is None else part.index_select(-2, rows)
            if not bool(seen.isfinite().all()):
                raise _not_a_number(loaded, f"layer {number}, whose keys or values are not")


def _not_a_number(loaded: LoadedModel, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model {loaded.model_id!r} computes values that are not numbers, from {where}. Nothing was stored or "
        f"answered. Its weights are damaged, or too large for {str(loaded.dtype).removeprefix('torch.')}: try "
        "dtype='bfloat16' or 'float32'."
    )


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
        return PrefixKV((), *(
            torch.empty(geometry.num_layers, geometry.num_kv_heads, 0, dim, dtype=loaded.dtype, device=loaded.device)
            for dim in (geometry.key_dim, geometry.value_dim)
        ))  # fmt: skip
    positions = torch.arange(len(token_ids), device=loaded.device)
    cache = BatchCache(geometry.num_layers, swaps=geometry.swaps)
    with torch.inference_mode():
        forward_pass = KVPass(positions, len(token_ids), geometry.num_layers - 1)
        forward_kv(loaded, torch.tensor([token_ids], device=loaded.device), positions, cache, forward_pass)
        keys, values = cache.chunk(0, slice(0, len(token_ids)))
    return PrefixKV(token_ids, keys, values)
