"""What is stored of a chunk's anchors, as the tensors of a sidecar: in the KV's dtype, in eight bits or in four."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store.format import from_int4, from_int8, to_int4, to_int8

__all__ = ["AnchorKV"]

_LARGEST_GROUP = 64
"""Channels that share a scale and a minimum in four bits, at most."""


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
    def chosen(cls, positions: Tensor, keys: Tensor, values: Tensor, layers: Sequence[int]) -> AnchorKV:
        """Take them from a chunk.

        Parameters
        ----------
        positions : Tensor
            int64 ``[A]``, ascending.
        keys, values : Tensor
            ``[L, Hkv, T, D]`` of its layers, up to the last one that scores at least.
        layers : sequence of int
            Those that score, ascending.
        """
        below = max(layers)
        return cls(positions, keys[:below, :, positions], values[:below, :, positions], keys[list(layers)])

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], layers: Sequence[int], dtype: torch.dtype, dims: tuple[int, int]
    ) -> AnchorKV:
        """Return what :meth:`tensors` gave for a sidecar.

        Parameters
        ----------
        tensors : mapping of str to Tensor
        layers : sequence of int
            Those that score, ascending.
        dtype : torch.dtype
            Of keys and values that are stored in eight bits or in four.
        dims : tuple of int
            Numbers of a key and of a value.
        """
        others, scored = (_restored(tensors, name, dtype, dims[0]) for name in ("other_keys", "scored_keys"))
        values, positions = _restored(tensors, "values", dtype, dims[1]), tensors["positions"].long()
        below = values.shape[0]
        keys = scored.new_empty(below, scored.shape[1], positions.shape[0], scored.shape[3])
        if below:
            keys[_without(layers, below)] = others
            among = [number for number, layer in enumerate(layers) if layer < below]
            keys[[layers[number] for number in among]] = scored[among][:, :, positions]
        return cls(positions, keys, values, scored)

    def fits(self, layers: Sequence[int], dtype: torch.dtype, num_tokens: int, room: tuple[int, int, int]) -> bool:
        """Whether this is what a chunk of so many tokens has in a model of such KV.

        Parameters
        ----------
        layers : sequence of int
            Those that score, ascending.
        dtype : torch.dtype
            Of the chunk's KV.
        num_tokens : int
            ``T``.
        room : tuple of int
            ``Hkv``, and numbers of a key and of a value.
        """
        (heads, key_dim, value_dim), count, below = room, self.positions.numel(), max(layers)
        places = torch.arange(num_tokens)
        return (
            {part.dtype for part in (self.keys, self.values, self.scored_keys)} == {dtype}
            and torch.equal(self.positions, places[torch.isin(places, self.positions)])
            and self.keys.shape == (below, heads, count, key_dim)
            and self.values.shape == (below, heads, count, value_dim)
            and self.scored_keys.shape == (len(layers), heads, num_tokens, key_dim)
        )

    def tensors(self, layers: Sequence[int], storage: str) -> dict[str, Tensor]:
        """Return the tensors of the sidecar: of the anchors' keys only those in layers that do not score.

        Parameters
        ----------
        layers : sequence of int
            Those that score, ascending.
        storage : str
            ``"int8"`` or ``"int4"``, with float16 scales, or ``"auto"``: as they are.

        Raises
        ------
        ConfigError
            A key or value is too large for the storage, or is NaN.
        """
        others = self.keys[_without(layers, self.values.shape[0])]
        return {
            "positions": self.positions.int(),
            **_stored("other_keys", others, storage),
            **_stored("values", self.values, storage),
            **_stored("scored_keys", self.scored_keys, storage),
        }


def _without(layers: Sequence[int], below: int) -> list[int]:
    """Return the layers below one that do not score."""
    return [layer for layer in range(below) if layer not in layers]


def _stored(name: str, part: Tensor, storage: str) -> dict[str, Tensor]:
    if storage == "auto":
        return {name: part.contiguous()}
    is_values = name == "values"
    if storage == "int8":
        # The axes that share scales in chunks.
        packed, scale = to_int8(part, 3 if is_values else 2)
        side = {f"{name}_scale": scale}
    else:
        # Keys have a mean, channel by channel, that is large beside what tells them apart.
        mean = torch.zeros(1) if is_values else part.float().mean(2, keepdim=True).to(torch.float16)
        packed, scale, least = to_int4(part.float() - mean.float(), _group(part.shape[-1]))
        side = {f"{name}_scale": scale, f"{name}_least": least}
        if not is_values:
            side[f"{name}_mean"] = mean
    if not all(bool(of.isfinite().all()) for of in side.values()):
        raise ConfigError(
            f"A chunk's keys or values are too large for anchors in {storage}, or NaN: use Anchors(..., "
            "storage='auto')."
        )
    return {name: packed, **side}


def _group(dim: int) -> int:
    """Return the size of even groups, all as large, that have the channels without much padding."""
    group = -(-dim // -(-dim // _LARGEST_GROUP))
    return group + group % 2


def _restored(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, dim: int) -> Tensor:
    part, scale, least = tensors[name], tensors.get(f"{name}_scale"), tensors.get(f"{name}_least")
    if scale is None:
        return part
    if least is None:
        return from_int8(part, scale, dtype)
    restored, mean = from_int4(part, scale, least, dim), tensors.get(f"{name}_mean")
    return (restored if mean is None else restored.add_(mean.float())).to(dtype)
