"""What an anchor probe sees of the chunks, put into the request's cache from sidecars alone.

The chunks' KV overwrites it later. Until then the probe may use all of the cache behind the prefix: the keys and values
that the question sees stand there side by side, ordered by position, so that nothing is gathered layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from fused_kv_kernels import RotationTable, place_chunks
from fused_kv_llm.kv import PlacedChunk
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.selectors import Anchors, View, anchor_positions, sink_scores
from fused_kv_llm.store import AnchorKV, AnchorLayout, Sidecars

from .request import Request

__all__ = ["ChunkAnchors", "read_anchors"]

_Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ChunkAnchors:
    """The anchors of a request's chunks, and the keys of the layers that score.

    Parameters
    ----------
    positions : list of Tensor
        int64, ascending: the anchors' prompt positions, by chunk.
    anchors : list of (Tensor, Tensor)
        Their keys and values ``[L, Hkv, A, D]`` in all layers below the last one that scores.
    scored_keys : list of Tensor
        ``[len(layers), Hkv, T, D]``: in the layers that score, keys of the chunk's tokens that stand in the prompt.
    starts : list of int
        Where the chunks begin in the prompt.
    layers : tuple of int
        Those that score.
    tables : list of RotationTable
        By layer of the model: how far each chunk's keys have to move.
    bytes_read : int
        Bytes read of sidecars, and of chunks without one.
    bytes_of_sidecars : int
        Bytes of the sidecars, each counted once.
    num_missing : int
        Chunks without a sidecar.
    num_unshifted : int
        Chunks with a context shift, but without the sidecar that has it, whose own stands in.
    """

    positions: list[Tensor]
    anchors: list[_Pair]
    scored_keys: list[Tensor]
    starts: list[int]
    layers: tuple[int, ...]
    tables: list[RotationTable]
    bytes_read: int = 0
    bytes_of_sidecars: int = 0
    num_missing: int = 0
    num_unshifted: int = 0

    def place(self, cache: FusedCache, visible: Tensor, available: Tensor) -> Tensor:
        """Put the anchors into the cache and return the keys that are scored.

        Parameters
        ----------
        cache : FusedCache
            Gets keys and values of the anchors in all layers below the last one that scores, each at its index in
            `visible`; anything else behind the prefix is lost.
        visible, available : Tensor
            int64, ascending prompt positions: what the question sees, and what is scored. Both contain the prefix.

        Returns
        -------
        Tensor
            ``[len(layers), Hkv, len(available), D]``, of which the chunks' part is written.
        """
        _, _, heads, _, dim = cache.keys.shape
        num_scored = len(self.layers)
        scored = torch.empty(num_scored, heads, available.shape[0], dim, dtype=cache.keys.dtype,
                             device=cache.keys.device)  # fmt: skip
        # The operator wants values too; those of the scored keys go where the anchors are put next.
        unused = cache.values[:num_scored, 0, :, : available.shape[0]]
        if unused.shape != scored.shape:
            unused = torch.empty_like(scored)
        tables = [self.tables[layer] for layer in self.layers]
        self._place([(keys, keys) for keys in self.scored_keys], available, tables, scored, unused)
        below = max((keys.shape[0] for keys, _ in self.anchors), default=0)
        if below:
            self._place(self.anchors, visible, self.tables[:below], cache.keys[:below, 0], cache.values[:below, 0])
        return scored

    def _place(
        self, chunks: list[_Pair], order: Tensor, tables: list[RotationTable], keys: Tensor, values: Tensor
    ) -> None:
        """Place neighbouring layers that rotate alike at once, as if they were heads of one layer."""
        starts = torch.searchsorted(order, torch.tensor(self.starts, dtype=torch.int64)).tolist()
        first = 0
        for _, run in groupby(tables, key=id):
            layers = slice(first, first + len(list(run)))
            flat = [(k[layers].flatten(0, 1), v[layers].flatten(0, 1)) for k, v in chunks]
            table, layer_keys = tables[first].to(keys.device), keys[layers].flatten(0, 1)
            place_chunks(flat, starts, table, layer_keys, values[layers].flatten(0, 1))
            first = layers.stop


def read_anchors(
    request: Request, view: View, anchors: Anchors, sidecars: Sidecars, geometry: Geometry
) -> ChunkAnchors:
    """Read what is stored of the anchors of a request's chunks.

    A chunk without a sidecar, or with one that does not fit it, has its first tokens as anchors, and its own KV is read
    for them.

    Parameters
    ----------
    request : Request
    view : View
    anchors : Anchors
        The view's.
    sidecars : Sidecars
    geometry : Geometry
    """
    layers, shift = view.layers, view.anchor_shift
    missing = unshifted = bytes_read = 0
    found: list[AnchorKV] = []
    loaded: dict[tuple[str, str], int] = {}
    for chunk in request.chunks:
        key = str(chunk.segment.key)
        names = request.anchor_names(chunk, view)
        layout = AnchorLayout(layers, chunk.stored.dtype, chunk.stored.num_tokens, geometry.room)
        sides = ((name, sidecars.read(key, name, layout.fits)) for name in names)
        name, side = next((found for found in sides if found[1] is not None), ("", None))
        unshifted += side is not None and name != names[0] and shift is not None and sidecars.has(key, shift)
        if side is None:
            missing += 1
            stored, nbytes = _from_the_chunk(chunk, anchors, layers)
        else:
            nbytes = loaded[key, name] = sum(part.nbytes for part in side.values())
            stored = AnchorKV.of(side, layout)
        bytes_read += nbytes
        found.append(_in_the_prompt(stored, chunk))
    deltas = torch.tensor([chunk.delta for chunk in request.chunks], dtype=torch.int64)
    return ChunkAnchors(
        [side.positions for side in found],
        [(side.keys, side.values) for side in found],
        [side.scored_keys for side in found],
        [chunk.segment.start for chunk in request.chunks],
        layers,
        geometry.tables(deltas),
        bytes_read,
        sum(loaded.values()),
        missing,
        unshifted,
    )


def _from_the_chunk(chunk: PlacedChunk, anchors: Anchors, layers: tuple[int, ...]) -> tuple[AnchorKV, int]:
    """Take from the chunk's KV what a missing sidecar would have; return it and the bytes that were read."""
    chosen = anchor_positions(sink_scores(chunk.stored.num_tokens), anchors.ratio)
    keys, values = chunk.stored.read_layers(0, max(layers) + 1)
    return AnchorKV.chosen(chosen, keys, values, layers), keys.nbytes + values.nbytes


def _in_the_prompt(side: AnchorKV, chunk: PlacedChunk) -> AnchorKV:
    """Leave out the anchors of tokens that do not stand in the prompt; the others get their positions there."""
    segment, count = chunk.segment, chunk.num_tokens
    positions = side.positions - segment.chunk_start
    if count < chunk.stored.num_tokens:
        kept = (positions >= 0) & (positions < count)
        positions = positions[kept]
        side = AnchorKV(positions, side.keys[:, :, kept], side.values[:, :, kept], side.scored_keys[:, :, chunk.inside])
    return replace(side, positions=positions + segment.start)
