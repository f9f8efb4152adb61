"""The forwards of a fusion: of rows of its prompt, and of tokens that are drafted behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_llm.model import ForwardPass, Geometry, RaggedPart

from .request import Request
from .request_kv import RequestKV
from .transfer import TransferPass, teaching

__all__ = ["Passes"]


class Passes:
    """Makes the forwards that write a request's KV.

    Parameters
    ----------
    request : Request
    kv : RequestKV
    geometry : Geometry
    strength : float
        Share of recomputed tokens' mean deviation that is transferred to the others of their chunk, in [0, 1].
    """

    def __init__(self, request: Request, kv: RequestKV, geometry: Geometry, strength: float) -> None:
        self._request, self._kv, self._geometry, self._strength = request, kv, geometry, strength

    def of_rows(self, rows: Tensor) -> RaggedPart:
        """Return the forward of some rows of the prompt, int64 positions, ascending."""
        kv, geometry = self._kv, self._geometry
        if self._strength and (known := teaching(self._request, rows)).numel():
            return self.part(TransferPass(self._request, rows, known, kv, geometry, self._strength))
        on_device = rows.to(kv.cache.keys.device)
        return self.part(ForwardPass(on_device, int(rows[-1]) + 1, kv.fillers, geometry.last_layer))

    def of_draft(self, positions: Sequence[int], token_ids: Sequence[int]) -> RaggedPart:
        """Return the forward of drafted tokens, behind the prompt."""
        device = self._kv.cache.keys.device
        rows = torch.tensor(positions, device=device)
        return RaggedPart(torch.tensor(token_ids, device=device), self._kv.cache, ForwardPass(rows, positions[-1] + 1))

    def part(self, forward_pass: ForwardPass) -> RaggedPart:
        """Return a pass over rows of the prompt with their ids and the request's cache."""
        device = self._kv.cache.keys.device
        ids = torch.tensor(self._request.ids, device=device)[forward_pass.rows]
        return RaggedPart(ids, self._kv.cache, forward_pass)
