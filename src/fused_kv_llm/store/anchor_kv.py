"""What is stored of a chunk's anchors, as the tensors of a sidecar: in the dtype of the KV, or in eight bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.store.format import from_int8, to_int8

__all__ = ["AnchorKV"]

_SCALED_ALONG = {"keys": 2, "values": 3, "critical_keys": 2}
"""By tensor, the axis whose numbers share a scale in eight bits, as chunks have it (KIVI, Liu et al. 2024)."""


@dataclass(frozen=True, slots=True, eq=False)
class AnchorKV:
    """What a probe sees of one chunk of ``T`` tokens, ``A`` of which are anchors.

    Parameters
    ----------
    positions : Tensor
        int64 ``[A]``, ascending: the anchors' places in the chunk.
    keys, values : Tensor
        ``[L, Hkv, A, D]``: theirs in all layers below the last one that scores.
    critical_keys : Tensor
        ``[layers, Hkv, T, D]``: keys of all tokens in the layers that score.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    critical_keys: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> AnchorKV:
        """Return what :meth:`tensors` gave for a sidecar; keys and values in this dtype if they are in eight bits."""
        parts = {
            name: from_int8(tensors[name], tensors[_scale(name)], dtype) if _scale(name) in tensors else tensors[name]
            for name in _SCALED_ALONG
        }
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
        for name, dim in _SCALED_ALONG.items():
            part: Tensor = getattr(self, name)
            if storage == "int8":
                side[name], side[_scale(name)] = to_int8(part, dim)
            else:
                side[name] = part.contiguous()
        return side


def _scale(name: str) -> str:
    return f"{name}_scale"
