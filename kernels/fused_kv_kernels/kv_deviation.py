"""KV deviation: how far the fresh KV of tokens is from their stored KV."""

from __future__ import annotations

from torch import Tensor

from .dispatch import triton_op, use_triton
from .reference import kv_deviation_reference

__all__ = ["kv_deviation"]


def kv_deviation(
    fresh_keys: Tensor,
    fresh_values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    fresh_rows: Tensor,
    stored_rows: Tensor,
) -> Tensor:
    """Return ``sqrt(|K_fresh - K_stored|^2 + |V_fresh - V_stored|^2)`` of tokens, over all heads.

    CacheBlend's deviation as FusionRAG section 2.2.2 (equations 7 and 8) gives it, in one pass.

    Parameters
    ----------
    fresh_keys, fresh_values : Tensor
        ``[Hk, R, Dk]`` and ``[Hv, R, Dv]``.
    stored_keys, stored_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``, keys at the same positions as the fresh ones.
    fresh_rows, stored_rows : Tensor
        int64 ``[T]``: where the tokens stand in either.

    Returns
    -------
    Tensor
        float32 ``[T]``.

    Raises
    ------
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    operands = {
        "fresh_keys": fresh_keys,
        "fresh_values": fresh_values,
        "stored_keys": stored_keys,
        "stored_values": stored_values,
    }
    if use_triton("KV deviation", fresh_rows, stored_rows, **operands):
        run = triton_op("kv_deviation", fresh_keys.device)
        found: Tensor = run(**operands, fresh_rows=fresh_rows, stored_rows=stored_rows)
        return found
    return kv_deviation_reference(**operands, fresh_rows=fresh_rows, stored_rows=stored_rows)
