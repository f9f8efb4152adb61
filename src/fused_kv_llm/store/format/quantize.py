"""Storage dtypes: keys and values are quantised on the way to the disk, and dequantised on the way back.

KIVI (Liu et al. 2024) found that keys have outlier channels and values do not: keys are scaled per channel over the
chunk's tokens, values per token over the channels. Keys are stored rotated, as they were prefilled; they are
dequantised to float32 before they are rotated on, so that moving a chunk adds no rounding to that of storing it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError

__all__ = [
    "STORAGE_DTYPES",
    "check_kv_dtype",
    "compress",
    "expand",
    "from_int4",
    "from_int8",
    "stored_bytes_per_token",
    "to_int4",
    "to_int8",
]

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GROUP = 32
STORAGE_DTYPES = (*_PLAIN, "int8", "int4")


def check_kv_dtype(kv_dtype: str) -> str:
    """Return a storage dtype.

    Raises
    ------
    ConfigError
        If it is neither ``"auto"`` nor one of ``STORAGE_DTYPES``.
    """
    if kv_dtype != "auto" and kv_dtype not in STORAGE_DTYPES:
        raise ConfigError(f"kv_dtype={kv_dtype!r} is unknown: use auto, {', '.join(STORAGE_DTYPES)}")
    return kv_dtype


def compress(keys: Tensor, values: Tensor, storage: str) -> dict[str, Tensor]:
    """Return the tensors that are stored for a chunk's KV.

    Parameters
    ----------
    keys, values : Tensor
        ``[layers, kv_heads, tokens, key_dim]`` and ``[layers, kv_heads, tokens, value_dim]``.
    storage : str
        One of ``STORAGE_DTYPES``.

    Returns
    -------
    dict of str to Tensor
        ``k`` and ``v``, with their scales (and minima, int4) where they are integers. All begin with the layers.

    Raises
    ------
    ConfigError
        A key or value is too large for the dtype, or is NaN.
    """
    if storage in _PLAIN:
        dtype = _PLAIN[storage]
        plain = {"k": keys.to(dtype), "v": values.to(dtype)}
        if storage == "float16" and keys.dtype != torch.float16:
            _check_range(storage, plain["k"], plain["v"])
        return plain
    if storage == "int8":
        k, k_scale = to_int8(keys, dim=2)
        v, v_scale = to_int8(values, dim=3)
        _check_range(storage, k_scale, v_scale)
        return {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}
    # Groups of tokens for keys, of channels for values: 15 steps are too few for a whole chunk.
    k, k_scale, k_least = to_int4(keys.float().transpose(2, 3))
    v, v_scale, v_least = to_int4(values.float())
    _check_range(storage, k_scale, k_least, v_scale, v_least)
    return {"k": k, "k_scale": k_scale, "k_least": k_least, "v": v, "v_scale": v_scale, "v_least": v_least}


def expand(parts: Mapping[str, Tensor], storage: str, dtype: torch.dtype, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return layers' keys and values in a dtype; views of what is stored where it has that dtype already.

    Parameters
    ----------
    parts : mapping of str to Tensor
        What ``compress`` returned, or layers of it.
    storage : str
        The storage dtype.
    dtype : torch.dtype
        Floating point. Integers are multiplied by their scales in float32 and rounded once.
    value_dim : int
        Width of the values.

    Returns
    -------
    keys, values : Tensor
        ``[layers, kv_heads, tokens, key_dim]`` and ``[layers, kv_heads, tokens, value_dim]``.
    """
    if storage in _PLAIN:
        return parts["k"].to(dtype), parts["v"].to(dtype)
    if storage == "int8":
        return from_int8(parts["k"], parts["k_scale"], dtype), from_int8(parts["v"], parts["v_scale"], dtype)
    keys = from_int4(parts["k"], parts["k_scale"], parts["k_least"], parts["v"].shape[2]).transpose(2, 3)
    values = from_int4(parts["v"], parts["v_scale"], parts["v_least"], value_dim)
    return keys.to(dtype, memory_format=torch.contiguous_format), values.to(dtype)


def to_int8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a tensor in eight bits, and its scales: float16, one for all numbers along an axis.

    A scale is infinite or NaN where a number is too large, or is NaN.

    Parameters
    ----------
    x : Tensor
        Floating point.
    dim : int
        The axis: that of the tokens for keys, of the channels for values (KIVI).
    """
    x = x.float()
    # Quantise with the rounded scale, so that rounding it adds no error.
    scale = (x.abs().amax(dim=dim, keepdim=True) / 127).clamp(min=2.0**-24).to(torch.float16)
    return (x / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale


def from_int8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return in a floating-point dtype what :func:`to_int8` made, multiplied in float32 and rounded once."""
    return x.float().mul_(scale.float()).to(dtype)


def to_int4(x: Tensor, group: int = _GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Return groups of the last axis in four bits, two in a byte, and their scales and minima, float16.

    A scale or a minimum is infinite or NaN where a number is too large, or is NaN.

    Parameters
    ----------
    x : Tensor
        float32.
    group : int
        Numbers that share a scale and a minimum; the last ones of an axis that is no multiple of it are padded.
    """
    # Padding with the last element changes no group's range.
    x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -x.shape[-1] % group)), dim=-1)
    groups = x.view(*x.shape[:-1], x.shape[-1] // group, group)
    least = groups.amin(dim=-1, keepdim=True).to(torch.float16)
    scale = ((groups.amax(dim=-1, keepdim=True) - least.float()) / 15).clamp(min=2.0**-24).to(torch.float16)
    q = ((groups - least.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
    return q[..., 0::2] | q[..., 1::2] << 4, scale.squeeze(-1), least.squeeze(-1)


def from_int4(packed: Tensor, scale: Tensor, least: Tensor, length: int) -> Tensor:
    """Return in float32 what :func:`to_int4` made of an axis of this length."""
    q = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    groups = q.view(*scale.shape, q.shape[-1] // scale.shape[-1]).float()
    return (groups * scale.float().unsqueeze(-1) + least.float().unsqueeze(-1)).flatten(-2)[..., :length]


def stored_bytes_per_token(storage: str, layers: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Return the bytes a token's keys and values take, scales per token included."""
    bits, width = {"int8": 8, "int4": 4}.get(storage), key_dim + value_dim
    if bits is None:
        return layers * heads * width * _PLAIN[storage].itemsize
    scales = 2 if bits == 8 else 4 * -(-value_dim // _GROUP) + 4 * key_dim // _GROUP
    return layers * heads * (width * bits // 8 + scales)


def _check_range(storage: str, *parts: Tensor) -> None:
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ConfigError(
            f"The chunk's keys or values are too large for kv_dtype={storage!r}, or NaN. Use 'bfloat16' or 'float32'."
        )
