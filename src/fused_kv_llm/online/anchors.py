"""What an anchor probe sees of the chunks, put into the request's cache from the side files alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Anchors, View
from fused_kv_llm.selectors.anchors import anchor_positions, side_name, sink_scores
from fused_kv_llm.store.sides import SideFiles

from .request import Placement, Request

__all__ = ["place_anchors"]


def place_anchors(
    request: Request, cache: FusedCache, view: View, sides: SideFiles, geometry: Geometry, report: FusionReport
) -> Tensor:
    """Put the anchors' KV and the critical layers' keys into the cache.

    Parameters
    ----------
    request : Request
    cache : FusedCache
        Gets keys and values at the anchors' positions below the deepest critical layer, and keys of all reusable
        tokens in the critical layers; the loader writes the same values there later.
    view : View
        With anchors.
    sides : SideFiles
    geometry : Geometry
    report : FusionReport
        Gets the bytes read, and a warning where a chunk has no side file: its first tokens are its anchors then,
        and its own KV is read.

    Returns
    -------
    Tensor
        int64, the anchors' prompt positions, ascending.
    """
    if view.anchors is None:
        return torch.empty(0, dtype=torch.int64)
    name, missing, found = side_name(view.anchors, view.layers), 0, []
    for placement in request.placements:
        side = sides.read(placement.stored.key, name)
        if side is None:
            missing += 1
            side = _from_the_chunk(placement, view.anchors, view.layers)
        report.selection_bytes += sum(part.nbytes for part in side.values())
        found.append(_place(placement, side, cache, view.layers, geometry))
    if missing:
        report.warnings.append(
            f"{missing} chunks have no stored anchors for {name}: their KV was read instead. "
            "FusedKVEngine.build_anchors() stores them."
        )
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _from_the_chunk(placement: Placement, anchors: Anchors, layers: tuple[int, ...]) -> dict[str, Tensor]:
    chosen = anchor_positions(sink_scores(placement.stored.num_tokens), anchors.ratio)
    keys, values = placement.stored.read_layers(0, max(layers) + 1)
    return {
        "positions": chosen,
        "keys": keys[: max(layers), :, chosen],
        "values": values[: max(layers), :, chosen],
        "critical_keys": keys[list(layers)],
    }


def _place(
    placement: Placement, side: dict[str, Tensor], cache: FusedCache, layers: tuple[int, ...], geometry: Geometry
) -> Tensor:
    segment = placement.segment
    positions = side["positions"].long()
    inside = (positions >= segment.chunk_start) & (positions < segment.chunk_start + placement.num_tokens)
    where = positions[inside] - segment.chunk_start + segment.start
    target = where.to(cache.keys.device)
    below = max(layers)
    moved = _move(side["keys"][:, :, inside], placement.delta, geometry)
    cache.keys[:below, 0].index_copy_(2, target, moved.to(cache.keys))
    cache.values[:below, 0].index_copy_(2, target, side["values"][:, :, inside].to(target.device))
    span = slice(segment.chunk_start, segment.chunk_start + placement.num_tokens)
    critical = _move(side["critical_keys"][:, :, span], placement.delta, geometry).to(target.device)
    for layer, keys in zip(layers, critical, strict=True):
        cache.keys[layer, 0, :, segment.start : segment.stop] = keys
    return where


def _move(keys: Tensor, delta: int, geometry: Geometry) -> Tensor:
    """Rotate ``[L, Hkv, T, D]`` keys by one distance, all layers in one go."""
    layers, heads, tokens, dim = keys.shape
    cos, sin = rotation_tables(torch.full((tokens,), delta), geometry.inv_freq)
    return rerotate_keys(keys.reshape(layers * heads, tokens, dim), cos, sin).view(layers, heads, tokens, dim)
