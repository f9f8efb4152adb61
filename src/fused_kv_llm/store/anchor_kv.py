"""What is stored of a chunk's anchors, as the tensors of a sidecar: in the KV's dtype, in eight bits or in four."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store.anchor_layout import AnchorLayout, layers_without_scores, scale_group
from fused_kv_llm.store.format import from_int4, from_int8, to_int4, to_int8

__all__ = ["AnchorKV"]


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
    def of(cls, tensors: Mapping[str, Tensor], layout: AnchorLayout) -> AnchorKV:
        """Return what :meth:`tensors` gave for a sidecar.

        Parameters
        ----------
        tensors : mapping of str to Tensor
        layout : AnchorLayout
            That they fit, see :meth:`.AnchorLayout.fits`.
        """
        layers, dtype, (_, key_dim, value_dim) = layout.layers, layout.dtype, layout.room
        others, scored = (_restored(tensors, name, dtype, key_dim) for name in ("other_keys", "scored_keys"))
        values, positions = _restored(tensors, "values", dtype, value_dim), tensors["positions"].long()
        below = values.shape[0]
        keys = scored.new_empty(below, scored.shape[1], positions.shape[0], scored.shape[3])
        if below:
            keys[layers_without_scores(layers, below)] = others
            among = [number for number, layer in enumerate(layers) if layer < below]
            keys[[layers[number] for number in among]] = scored[among][:, :, positions]
        return cls(positions, keys, values, scored)

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
        others = self.keys[layers_without_scores(layers, self.values.shape[0])]
        return {
            "positions": self.positions.int(),
            **_stored("other_keys", others, storage),
            **_stored("values", self.values, storage),
            **_stored("scored_keys", self.scored_keys, storage),
        }


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
        packed, scale, least = to_int4(part.float() - mean.float(), scale_group(part.shape[-1]))
        side = {f"{name}_scale": scale, f"{name}_least": least}
        if not is_values:
            side[f"{name}_mean"] = mean
    if not all(bool(of.isfinite().all()) for of in side.values()):
        raise ConfigError(
            f"A chunk's keys or values are too large for anchors in {storage}, or NaN: use Anchors(..., "
            "storage='auto')."
        )
    return {name: packed, **side}


def _restored(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, dim: int) -> Tensor:
    part, scale, least = tensors[name], tensors.get(f"{name}_scale"), tensors.get(f"{name}_least")
    if scale is None:
        return part
    if least is None:
        return from_int8(part, scale, dtype)
    restored, mean = from_int4(part, scale, least, dim), tensors.get(f"{name}_mean")
    return (restored if mean is None else restored.add_(mean.float())).to(dtype)
