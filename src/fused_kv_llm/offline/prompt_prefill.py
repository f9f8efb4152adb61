"""Prefilling prompts of chunks: the KV that a chunk has in a prompt, with which its stored KV is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys, why_not_native
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import (
    AttentionRule,
    CachePool,
    EightBitLinears,
    FusedCache,
    KVPass,
    LoadedModel,
    ModelOwner,
    PieceSpeed,
    check_numbers,
    forward_kv,
)
from fused_kv_llm.prompt import Segment

__all__ = ["PromptPrefill"]

_PIECE_TOKENS = 1024

_KEPT_BYTES = 2**27
"""Most memory that is kept from prompt to prompt on a CPU. A larger prompt spends little of its time on fresh pages."""


class PromptPrefill:
    """Prefills prompts, one after another, in pieces between those of requests.

    Parameters
    ----------
    loaded : LoadedModel
    owner : ModelOwner
        Computes the pieces.
    linears : EightBitLinears or None
        Computes the linear layers, if not the model itself. Attention is then computed by
        :func:`.eight_bit_row_attention`. Where the processor has instructions for bfloat16, the KV of a float32 model
        is in bfloat16 meanwhile, unless the model expands what it caches (latent attention).
    """

    def __init__(self, loaded: LoadedModel, owner: ModelOwner, linears: EightBitLinears | None = None) -> None:
        self._loaded, self._owner, self._linears = loaded, owner, linears
        is_coarse = linears is not None and loaded.geometry.attends_cache and why_not_native(torch.bfloat16) is None
        self._kv_dtype = torch.bfloat16 if is_coarse else loaded.dtype
        self._speed = None if linears is None else PieceSpeed()
        # One prompt after another uses the same memory: mapping fresh pages would take a part of its time.
        self._pool = CachePool(self._kv_dtype, loaded.device, _KEPT_BYTES if loaded.device.type == "cpu" else 0)

    def true_kv(
        self,
        ids: Sequence[int],
        segments: Sequence[Segment],
        known: Iterable[tuple[Segment, ChunkKV]],
        stopped: Callable[[], bool],
    ) -> Iterator[ChunkKV]:
        """Yield the KV that chunks have in a prompt, where they stand in it.

        Parameters
        ----------
        ids : sequence of int
            The prompt's, ``N`` tokens.
        segments : sequence of Segment
            Its chunks.
        known : iterable of tuple of Segment and ChunkKV
            Other chunks of the prompt, which are not computed, and the KV that is used for them, from any position. It
            is read once, before anything is computed, and one after the other.
        stopped : callable
            Asked before every piece.

        Yields
        ------
        ChunkKV
            In the dtype of attention: views, to be read before the next prompt is begun, and to be let go then. Nothing
            is computed before the first is asked for.

        Raises
        ------
        UnsupportedModelError
            If it is not finite.
        StoppedError
            If it was stopped.
        """
        loaded, geometry = self._loaded, self._loaded.geometry
        cache = FusedCache(geometry, len(ids), self._pool)
        try:
            if any(shape != geometry.room for shape in geometry.shapes):
                # A layer of smaller heads than others leaves room that is stored with its KV.
                cache.keys.zero_()
                cache.values.zero_()
            left = torch.ones(len(ids), dtype=torch.bool, device=loaded.device)
            for segment, kv in known:
                place = slice(segment.start, segment.stop)
                left[place] = False
                cache.keys[:, 0, :, place] = _moved(kv.keys, segment.start - kv.position, loaded)
                cache.values[:, 0, :, place] = kv.values
            self._compute(torch.tensor(ids, device=loaded.device), left.nonzero()[:, 0], cache, stopped)
            for segment in segments:
                place = slice(segment.start, segment.stop)
                keys, values = (part[:, 0, :, place] for part in (cache.keys, cache.values))
                yield ChunkKV(keys, values, tuple(ids[place]), segment.start)
        finally:
            cache.release()

    def _compute(self, ids: Tensor, left: Tensor, cache: FusedCache, stopped: Callable[[], bool]) -> None:
        """Compute the tokens at positions `left`, which are ascending, and check the KV of all."""
        while len(left):
            # Pieces of one length: a short last one would be slow for its tokens.
            pieces = -(-len(left) // self._owner.piece_tokens(_PIECE_TOKENS, self._speed))
            tokens = -(-len(left) // pieces)
            rows, left = left[:tokens], left[tokens:]
            # How fast eight bits are says nothing about other pieces.
            measured = len(rows) if self._speed is None else 0
            self._owner.run(partial(self._forward, ids, rows, cache), measured, stopped)
        layers = list(zip(cache.keys, cache.values, strict=True))
        check_numbers(layers, self._loaded.model_id, self._loaded.dtype)

    def _forward(self, ids: Tensor, rows: Tensor, cache: FusedCache) -> None:
        self._loaded.check_unchanged()
        started_s = time.perf_counter()
        forward_pass = _PromptPass(rows, int(rows[-1]) + 1, self._loaded.geometry.num_layers - 1)
        forward_pass.linears, forward_pass.kv_dtype = self._linears, self._kv_dtype
        with torch.inference_mode():
            forward_kv(self._loaded, ids[rows][None], rows, cache, forward_pass)
        if self._speed is not None:
            self._speed.note(time.perf_counter() - started_s, len(rows))


class _PromptPass(KVPass):
    """A pass whose attention is computed in the cache's dtype or, if its linear layers are, in eight bits."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output in the queries' dtype, or end the forward."""
        rule = replace(rule, eight_bit=self.linears is not None)
        return super().attend(layer_idx, q.to(k.dtype), k, v, rule).to(q.dtype)


def _moved(keys: Tensor, by: int, loaded: LoadedModel) -> Tensor:
    """Return the keys of all layers ``[L, Hkv, T, D]`` in float32, moved by a number of positions."""
    tables = loaded.geometry.tables(torch.tensor([by]), loaded.device)
    if all(table is tables[0] for table in tables):
        return rerotate_keys(keys, tables[0])
    return torch.stack([rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)])
