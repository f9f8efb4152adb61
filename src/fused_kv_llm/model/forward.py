"""Running a model through the seam: rows in, hidden states or logits out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_kernels import RowPlan, row_attention
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model.attention import ATTENTION_NAME, AttentionPass, no_mask
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.fused_forward import fused_forward
from fused_kv_llm.model.loading import LoadedModel

__all__ = [
    "KVPass",
    "PrefixKV",
    "RowPass",
    "StopForwardError",
    "compute_prefix",
    "forward_kv",
    "forward_rows",
]


class StopForwardError(Exception):
    """Raised by an attention pass to end a forward that has brought what it was run for."""


class RowPass:
    """A forward pass whose rows attend by true position.

    Parameters
    ----------
    plan : RowPlan
        Rows and keys.
    final_layer : int or None
        The model's last layer when only the last row's logits are wanted: there, no other row's attention
        output is used by anything, so it is not computed.
    """

    def __init__(self, plan: RowPlan, final_layer: int | None = None) -> None:
        self.plan = plan
        self.final_layer = final_layer if plan.num_rows > 1 else None
        self.last_row = RowPlan(plan.q_positions[-1:], plan.num_keys) if self.final_layer is not None else plan

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[B, Hq, R, D]``."""
        if layer_idx != self.final_layer:
            return row_attention(q, k, v, self.plan, scale)
        output = torch.zeros_like(q)
        output[:, :, -1:] = row_attention(q[:, :, -1:], k, v, self.last_row, scale)
        return output


class KVPass(RowPass):
    """A forward pass that is run for its keys and values only: it ends once the last layer's are there."""

    def __init__(self, plan: RowPlan, last_layer: int) -> None:
        super().__init__(plan)
        self.last_layer = last_layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[B, Hq, R, D]``, or end the forward."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, scale)


def _inputs(
    loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache, state: AttentionPass
) -> dict[str, object]:
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
        "fused_pass": state,
    }


def forward_kv(loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache, state: AttentionPass) -> None:
    """Run the decoder, without its output head, until the pass ends it.

    Parameters
    ----------
    loaded : LoadedModel
    ids : Tensor
        int64 ``[B, R]``.
    positions : Tensor
        int64 ``[R]``.
    cache : Cache
        Receives the keys and values.
    state : AttentionPass
        Raises :class:`StopForwardError` when it has what it needs.
    """
    with fused_forward(), contextlib.suppress(StopForwardError):
        loaded.model.get_decoder()(**_inputs(loaded, ids, positions, cache, state))


def forward_rows(
    loaded: LoadedModel, ids: Tensor, positions: Tensor, cache: Cache, state: AttentionPass, keep: int
) -> Tensor:
    """Run the model and return the logits of the last `keep` rows.

    Returns
    -------
    Tensor
        float32 ``[keep, vocabulary]``; `keep` 0 means all rows.
    """
    with fused_forward(last_row_only=keep == 1):
        output = loaded.model(**_inputs(loaded, ids, positions, cache, state), logits_to_keep=keep)
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
    """Prefill the prompt's fixed header once.

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
        state = KVPass(RowPlan(positions, len(token_ids)), geometry.num_layers - 1)
        forward_kv(loaded, torch.tensor([token_ids], device=loaded.device), positions, cache, state)
        keys, values = cache.chunk(0, len(token_ids))
    return PrefixKV(token_ids, keys, values)
