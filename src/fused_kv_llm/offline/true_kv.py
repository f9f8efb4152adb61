"""The KV that full prefill gives the chunks of a prompt, which stored KV is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import (
    CachePool,
    FusedCache,
    Geometry,
    KVPass,
    LoadedModel,
    ModelOwner,
    check_numbers,
    forward_kv,
)
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
    known: Sequence[tuple[int, ChunkKV]] = (),
) -> list[ChunkKV]:
    """Prefill a prompt but for KV that is known, in pieces between those of requests, and return the KV of its chunks.

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
    known : sequence of tuple of int and ChunkKV
        KV that is not computed, ascending, with the place of its first token; its keys are moved there.

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

    all_ids = torch.tensor([ids], device=device)

    def compute(piece: Tensor) -> None:
        loaded.check_unchanged()
        with torch.inference_mode():
            state = KVPass(piece, int(piece[-1]) + 1, geometry.num_layers - 1)
            forward_kv(loaded, all_ids[:, piece], piece, cache, state)

    try:
        rows = torch.arange(len(ids), device=device)
        for place, kv in known:
            rows = rows[(rows < place) | (rows >= place + len(kv.token_ids))]
            cache.keys[:, 0, :, place : place + len(kv.token_ids)] = _moved(kv.keys, place - kv.position, geometry)
            cache.values[:, 0, :, place : place + len(kv.token_ids)] = kv.values
        while len(rows):
            piece = rows[: owner.piece_tokens(_PIECE_TOKENS)]
            owner.run(partial(compute, piece), len(piece), stopped)
            rows = rows[len(piece) :]
        whole = [
            (keys[..., : len(ids), :], values[..., : len(ids), :])
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        check_numbers(whole, loaded.model_id, loaded.dtype)
        found = []
        for segment in segments:
            keys, values = (part[:, 0, :, segment.start : segment.stop] for part in (cache.keys, cache.values))
            moved = _moved(keys, home - segment.start, geometry)
            found.append(ChunkKV(moved, values.clone(), tuple(ids[segment.start : segment.stop]), home))
        return found
    finally:
        cache.release()


def _moved(keys: Tensor, delta: int, geometry: Geometry) -> Tensor:
    """Return keys ``[L, Hkv, T, D]`` so many positions further on, in their dtype."""
    tables = geometry.tables(torch.tensor([delta]), keys.device)
    return torch.stack([rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)]).to(keys.dtype)
