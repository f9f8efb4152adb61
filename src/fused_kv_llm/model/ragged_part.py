"""One request's part of a pass of several, and how it is attended there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.forward_pass import ForwardPass
from fused_kv_llm.model.view_cache import ViewCache

__all__ = ["PartKind", "RaggedPart"]


class PartKind(IntEnum):
    """How a part is attended; parts of one kind stand one behind another, in this order."""

    CACHE = 0
    """An answer's next token, in a cache that is laid out as decode attention takes it."""
    VIEW = 1
    """An answer's next token, over pages that its request shares."""
    ALONE = 2
    """All others, each by itself."""


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """What one request has computed.

    Parameters
    ----------
    ids : Tensor
        int64 ``[R]``: the tokens of its rows.
    cache : FusedCache
    forward_pass : ForwardPass
        Over that cache. Of several rows, only the last one's logits are wanted where requests are computed together.

    Notes
    -----
    Parts of one row, the next tokens of answers, are attended together.
    """

    ids: Tensor
    cache: FusedCache
    forward_pass: ForwardPass

    @property
    def position(self) -> int:
        """Where its first row stands."""
        return int(self.forward_pass.rows[0])

    @property
    def kind(self) -> PartKind:
        """How it is attended."""
        geometry, forward_pass = self.cache.geometry, self.forward_pass
        if isinstance(self.cache, ViewCache):
            return PartKind.VIEW
        alike = geometry.has_one_shape and not geometry.swaps
        own_kv = geometry.last_layer == geometry.num_layers - 1
        whole = type(forward_pass) is ForwardPass and not forward_pass.fillers and forward_pass.key_positions is None
        sees_all = isinstance(forward_pass.visible, int) and forward_pass.visible == self.position + 1
        return PartKind.CACHE if alike and own_kv and whole and sees_all and self.ids.shape[0] == 1 else PartKind.ALONE
