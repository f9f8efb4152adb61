"""Deviation transfer: what recomputed tokens teach about the tokens of their chunk that are not recomputed.

CacheBlend (section 4.2) measures how far fresh KV deviates from stored KV to choose tokens, and throws the measurement
away. But much of the deviation is common to a chunk, whose tokens all attend to the same other chunks now. So while a
layer is recomputed, the mean deviation of a chunk's recomputed tokens is added to the stored KV of its other tokens:

    K_j += R(p_j) s / (n + m) * sum_i R(-p_i) (K_i' - K_i),    V_j += s / (n + m) * sum_i (V_i' - V_i)

over the ``n`` tokens ``i`` of the chunk that are recomputed, with the rotation ``R(p)`` of position ``p``, a strength
``s``, and ``m`` that keeps chunks with few recomputed tokens from trusting them. A chunk whose KV is exact has no
deviation and is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import TransferPlan, transfer_deviation
from fused_kv_llm.model import ForwardPass, Geometry

from .divergence import DeviationMeter
from .request import Request
from .request_kv import RequestKV

__all__ = ["SHRINKAGE_TOKENS", "SINK_TOKENS", "TransferPass", "teaching"]

SHRINKAGE_TOKENS = 6.0

SINK_TOKENS = 4
"""Tokens at the beginning of every chunk whose deviation is not transferred."""


def teaching(request: Request, rows: Tensor) -> Tensor:
    """Return those of a pass's rows, int64 positions, whose deviation says something about their chunk's others."""
    of_chunks = rows[request.kind[rows] >= 0]
    starts = torch.tensor([chunk.segment.start for chunk in request.chunks])
    return of_chunks[of_chunks - starts[request.kind[of_chunks]] >= SINK_TOKENS] if of_chunks.numel() else of_chunks


class TransferPass(ForwardPass):
    """A fused pass that corrects the stored KV of the request's chunks, layer by layer.

    Parameters
    ----------
    request : Request
    rows : Tensor
        int64 ``[R]``, ascending prompt positions that the pass computes.
    selected : Tensor
        int64, ascending: those of them that teach (:func:`teaching`). Not empty.
    kv : RequestKV
    geometry : Geometry
    strength : float
        Share of the mean deviation that is transferred, in [0, 1].

    Attributes
    ----------
    meter : DeviationMeter
        How far the fresh values were from the stored ones.
    num_teaching : int
    """

    def __init__(
        self,
        request: Request,
        rows: Tensor,
        selected: Tensor,
        kv: RequestKV,
        geometry: Geometry,
        strength: float,
    ) -> None:
        device = kv.cache.keys.device
        super().__init__(rows.to(device), int(rows[-1]) + 1, kv.fillers, geometry.last_layer)
        counts = torch.bincount(request.kind[selected], minlength=len(request.chunks))
        spans = torch.tensor([(chunk.segment.start, chunk.segment.stop) for chunk in request.chunks])
        self._tables = geometry.tables(torch.arange(request.num_tokens), device)
        self._kv = kv
        self.num_teaching = int(selected.shape[0])
        self.meter = DeviationMeter(geometry.num_layers)
        self._plan = TransferPlan(
            selected=selected.to(device),
            fresh_rows=torch.searchsorted(rows, selected).to(device),
            spans=spans.to(device),
            weights=(strength / (counts + SHRINKAGE_TOKENS)).to(device),
        )

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Correct one layer by its fresh rows ``[1, Hkv, R, D]`` before they replace the stored ones.

        A pass that another request in it has broken is run again. A layer that was corrected then stays as it is: its
        fresh rows are there already and deviate from nothing.
        """
        cache = self._kv.cache
        fresh = cache.padded(keys[0], values[0])
        layer = cache.keys[layer_idx, 0], cache.values[layer_idx, 0]
        plan = self._plan
        self.meter.measure(layer_idx, fresh[1][:, plan.fresh_rows], layer[1][:, plan.selected])
        totals = None if self._kv.changes is None else self._kv.changes.vector_totals(layer_idx)
        transfer_deviation(self._plan, self._tables[layer_idx], *fresh, *layer, totals)
