"""What is stored of a chunk's anchors, as the tensors of a sidecar: in the dtype of the KV, or in eight bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store.format import from_int8, to_int8

__all__ = ["AnchorKV"]

_STORED = {"keys": ("keys", 2), "values": ("values", 3), "scored_keys": ("critical_keys", 2)}
"""By field, the tensor's name in the file, and the axis whose numbers share a scale in eight bits, as in chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class AnchorKV:
    """What a probe sees of one chunk of ``T`` tokens, ``A`` of which are anchors.

    Parameters
    ----------
    positions : Tensor
        int64 ``[A]``, ascending: the anchors' places in the chunk.
    keys, values : Tensor
        ``[L, Hkv, A, D]``: theirs in all layers below the last one that scores.
    scored_keys : Tensor
        ``[layers, Hkv, T, D]``: keys of all tokens in the layers that score.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    scored_keys: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> AnchorKV:
        """Return what :meth:`tensors` gave for a sidecar; keys and values in this dtype if they are in eight bits."""
        parts = {}
        for field, (name, _) in _STORED.items():
            scale = tensors.get(_scale(name))
            parts[field] = tensors[name] if scale is None else from_int8(tensors[name], scale, dtype)
        return cls(tensors["positions"].long(), **parts)

    def tensors(self, storage: str) -> dict[str, Tensor]:
        """Return the tensors of the sidecar.

        Parameters
        ----------
        storage : str
            ``"int8"``, with float16 scales, or ``"auto"``: as they are.

        Raises
        ------
        ConfigError
            A key or value is too large for eight bits, or is NaN.
        """
        side = {"positions": self.positions.int()}
        for field, (name, axis) in _STORED.items():
            part: Tensor = getattr(self, field)
            if storage != "int8":
                side[name] = part.contiguous()
                continue
            side[name], scale = to_int8(part, axis)
            if not bool(scale.isfinite().all()):
                raise ConfigError(
                    "A chunk's keys or values are too large for anchors in eight bits, or NaN: use "
                    "Anchors(..., storage='auto')."
                )
            side[_scale(name)] = scale
        return side


def _scale(name: str) -> str:
    return f"{name}_scale"
