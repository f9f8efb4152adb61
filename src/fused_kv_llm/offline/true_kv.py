"""The KV that full prefill gives the chunks of a prompt, which stored KV is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import CachePool, FusedCache, KVPass, LoadedModel, ModelOwner, check_numbers, forward_kv
from fused_kv_llm.prompt import Segment

__all__ = ["true_kv"]

_PIECE_TOKENS = 1024


def true_kv(
    loaded: LoadedModel,
    owner: ModelOwner,
    ids: Sequence[int],
    segments: Sequence[Segment],
    home: int,
    stopped: Callable[[], bool],
) -> list[ChunkKV]:
    """Prefill a prompt in full, in pieces between those of requests, and return the KV of its chunks.

    Parameters
    ----------
    loaded : LoadedModel
    owner : ModelOwner
    ids : sequence of int
        The prompt's, ``N`` tokens.
    segments : sequence of Segment
        Its chunks.
    home : int
        Position to which their keys are moved.
    stopped : callable
        Asked before every piece.

    Returns
    -------
    list of ChunkKV
        In the model's dtype, at position `home`.

    Raises
    ------
    UnsupportedModelError
        If it is not finite.
    StoppedError
        If it was stopped.
    """
    geometry, device = loaded.geometry, loaded.device
    cache = FusedCache(geometry, len(ids), CachePool(loaded.dtype, device, max_bytes=0))
    # A layer of smaller heads than others leaves room that is stored with its KV.
    for room in (cache.keys, cache.values):
        room.zero_()

    def compute(start: int, stop: int) -> None:
        loaded.check_unchanged()
        rows = torch.arange(start, stop, device=device)
        with torch.inference_mode():
            piece = torch.tensor([ids[start:stop]], device=device)
            forward_kv(loaded, piece, rows, cache, KVPass(rows, stop, geometry.num_layers - 1))

    try:
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + owner.piece_tokens(_PIECE_TOKENS))
            owner.run(lambda start=start, stop=stop: compute(start, stop), stop - start, stopped)  # type: ignore[misc]
            start = stop
        check_numbers(list(zip(cache.keys, cache.values, strict=True)), loaded.model_id, loaded.dtype,
                      torch.arange(len(ids), device=device))  # fmt: skip
        found = []
        for segment in segments:
            keys, values = (part[:, 0, :, segment.start : segment.stop] for part in (cache.keys, cache.values))
            tables = geometry.tables(torch.tensor([home - segment.start]), device)
            moved = torch.stack([rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)])
            found.append(
                ChunkKV(moved.to(values.dtype), values.clone(), tuple(ids[segment.start : segment.stop]), home)
            )
        return found
    finally:
        cache.release()
