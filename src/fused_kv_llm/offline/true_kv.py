"""The KV that the chunks of a prompt have there, which stored KV is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import (
    CachePool,
    EightBitLinears,
    FusedCache,
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
    known: Sequence[tuple[Segment, ChunkKV]],
    stopped: Callable[[], bool],
    linears: EightBitLinears | None = None,
) -> list[ChunkKV]:
    """Prefill a prompt, in pieces between those of requests, and return the KV of its chunks.

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
    known : sequence of tuple of Segment and ChunkKV
        Other chunks of the prompt, which are not computed, and the KV that is used for them, from any position.
    stopped : callable
        Asked before every piece.
    linears : EightBitLinears or None
        Computes the linear layers, if not the model itself.

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

    all_ids, computed = torch.tensor(ids, device=device), torch.ones(len(ids), dtype=torch.bool, device=device)

    def compute(rows: Tensor) -> None:
        loaded.check_unchanged()
        forward_pass = KVPass(rows, int(rows[-1]) + 1, geometry.num_layers - 1)
        forward_pass.linears = linears
        with torch.inference_mode():
            forward_kv(loaded, all_ids[rows][None], rows, cache, forward_pass)

    try:
        for segment, kv in known:
            place = slice(segment.start, segment.stop)
            computed[place] = False
            cache.keys[:, 0, :, place] = _moved(kv.keys, segment.start - kv.position, loaded)
            cache.values[:, 0, :, place] = kv.values
        left = computed.nonzero()[:, 0]
        while len(left):
            tokens = owner.piece_tokens(_PIECE_TOKENS)
            rows, left = left[:tokens], left[tokens:]
            # How fast eight bits are says nothing about other pieces.
            measured = len(rows) if linears is None else 0
            owner.run(lambda rows=rows: compute(rows), measured, stopped)  # type: ignore[misc]
        check_numbers(list(zip(cache.keys, cache.values, strict=True)), loaded.model_id, loaded.dtype,
                      torch.arange(len(ids), device=device))  # fmt: skip
        found = []
        for segment in segments:
            keys, values = (part[:, 0, :, segment.start : segment.stop] for part in (cache.keys, cache.values))
            moved = _moved(keys, home - segment.start, loaded)
            found.append(ChunkKV(moved, values.clone(), tuple(ids[segment.start : segment.stop]), home))
        return found
    finally:
        cache.release()


def _moved(keys: Tensor, by: int, loaded: LoadedModel) -> Tensor:
    """Return the keys of all layers, ``[L, Hkv, T, D]``, moved by a number of positions."""
    tables = loaded.geometry.tables(torch.tensor([by]), loaded.device)
    return torch.stack([rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)]).to(keys.dtype)
