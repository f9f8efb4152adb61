"""vLLM's KV caches: how some of their blocks become the tensors of a span, and how these become blocks again.

A layer's cache is ``[B, H, N, C]``: blocks, KV heads, tokens in a block, and what a token has in a head. What the last
two axes mean is the attention backend's business: on CPUs keys and values are packed for the instructions of the
processor. A block is therefore stored as it is, and its layout is a part of the identity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import UnsupportedModelError

__all__ = ["BlockCaches", "BlockLayout", "WriteLayer"]

WriteLayer = Callable[[str, Tensor, Tensor, Tensor], None]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What the blocks of a model's caches look like.

    Parameters
    ----------
    backend : str
        Name of the attention backend, with whatever else decides how it packs a block.
    dtype : str
        Of the caches.
    layers, heads, block_tokens, width : int
        Layers; KV heads; tokens in a block; elements that a token has in a head, its key and its value.
    """

    backend: str
    dtype: str
    layers: int
    heads: int
    block_tokens: int
    width: int


class BlockCaches:
    """The caches of all layers of a model.

    Parameters
    ----------
    caches : mapping of str to Tensor
        By the layers' names, ``[B, H, N, C]`` each, as ``register_kv_caches`` gets them. A kernel's block may be a part
        of a block that the scheduler counts.
    block_tokens : int
        Tokens of a block that the scheduler counts.
    backend : str
        See :class:`BlockLayout`.
    write_layer : callable
        Writes a layer's keys and values ``[tokens, heads, dim]`` to slots, int64 ``[tokens]``, as the backend packs
        them; gets the layer's name, keys, values and slots.

    Raises
    ------
    UnsupportedModelError
        The layers do not all have such caches, alike.
    """

    def __init__(
        self, caches: Mapping[str, Tensor], block_tokens: int, backend: str, write_layer: WriteLayer | None = None
    ) -> None:
        self._names, self._write_layer = sorted(caches, key=_by_number), write_layer
        self._caches = [caches[name] for name in self._names]
        forms = {(tuple(cache.shape), cache.dtype) for cache in self._caches}
        if len(forms) != 1:
            raise UnsupportedModelError(
                f"The KV caches of the model's {len(self._caches)} layers have {len(forms)} different shapes: "
                f"{sorted(map(str, forms))[:4]}. FusedKVConnector needs layers with one shape of KV."
            )
        shape, dtype = forms.pop()
        if len(shape) != 4 or dtype not in _DTYPES or shape[3] % 2 or block_tokens % shape[2]:
            raise UnsupportedModelError(
                f"A KV cache of shape {list(shape)} and dtype {dtype}, with blocks of {block_tokens} tokens, cannot be "
                "stored. FusedKVConnector stores caches [blocks, heads, tokens, width] in float32, bfloat16 or "
                "float16: leave kv_cache_dtype at 'auto'."
            )
        self._kernel_blocks = block_tokens // shape[2]
        name = str(dtype).removeprefix("torch.")
        self.layout = BlockLayout(backend, name, len(self._caches), shape[1], block_tokens, shape[3])

    def gather(self, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copy blocks out of the caches.

        Parameters
        ----------
        blocks : sequence of int
            As the scheduler counts them, in the order of their tokens.

        Returns
        -------
        keys, values : Tensor
            ``[layers, heads, tokens, width / 2]`` on the CPU: the halves of the caches' last axis, whatever they mean.
        """
        rows = self._rows(blocks)
        layers = [cache.index_select(0, rows).transpose(0, 1).flatten(1, 2) for cache in self._caches]
        keys, values = torch.stack(layers).to("cpu").chunk(2, dim=3)
        return keys.contiguous(), values.contiguous()

    def scatter(self, keys: Tensor, values: Tensor, blocks: Sequence[int], skipped: int = 0) -> None:
        """Copy what :meth:`gather` returned into blocks.

        Parameters
        ----------
        keys, values : Tensor
        blocks : sequence of int
            Where its blocks go, but for those skipped.
        skipped : int
            How many blocks at its beginning are not wanted.
        """
        rows, tokens = self._rows(blocks), self.layout.block_tokens
        part = slice(skipped * tokens, (skipped + len(blocks)) * tokens)
        joined = torch.cat((keys[:, :, part], values[:, :, part]), dim=3)
        for cache, layer in zip(self._caches, joined.to(self._caches[0].device), strict=True):
            cache.index_copy_(0, rows, layer.unflatten(1, (len(rows), -1)).transpose(0, 1))

    def write(self, keys: Tensor, values: Tensor, blocks: Sequence[int], skipped: int = 0) -> bool:
        """Write keys and values that are no blocks of vLLM's.

        Parameters
        ----------
        keys, values : Tensor
            ``[layers, heads, tokens, width / 2]``, keys with their rotation.
        blocks, skipped
            As for :meth:`scatter`; the last block need not be full.

        Returns
        -------
        bool
            False if the backend has no way to do it.
        """
        if self._write_layer is None:
            return False
        size, device = self.layout.block_tokens, self._caches[0].device
        first, count = skipped * size, keys.shape[2] - skipped * size
        slots = torch.tensor(list(blocks), dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)
        slots = slots.flatten()[:count].to(device)
        for name, of_keys, of_values in zip(self._names, keys, values, strict=True):
            k, v = (part[:, first:].transpose(0, 1).contiguous().to(device) for part in (of_keys, of_values))
            self._write_layer(name, k, v, slots)
        return True

    def _rows(self, blocks: Sequence[int]) -> Tensor:
        first = torch.tensor(list(blocks), dtype=torch.int64).unsqueeze(1) * self._kernel_blocks
        return (first + torch.arange(self._kernel_blocks)).flatten().to(self._caches[0].device)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Order names of layers by the numbers in them, whatever order they come in."""
    return [(int(part or -1), other) for part, other in re.findall(r"(\d+)|(\D+)", name)]
