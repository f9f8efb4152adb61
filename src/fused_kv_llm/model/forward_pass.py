"""Passes whose rows attend by true position: what they write to a cache, and what they see of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.pass_context import LayerPass, StopForwardError

__all__ = ["ForwardPass", "KVPass", "LayerFiller"]


class LayerFiller(Protocol):
    """Brings stored KV into a request's cache."""

    def fill(self, layer_idx: int) -> None:
        """Have the layer's stored KV in place; called again for the same layer, do nothing."""


class ForwardPass(LayerPass):
    """A forward pass whose rows attend by true position.

    Parameters
    ----------
    rows : Tensor
        int64 ``[R]``, ascending: where the rows' keys and values are written in the cache.
    visible : int or Tensor
        What attention sees of the cache: its first `visible` positions, or the positions listed, int64 ``[N]``,
        ascending, `rows` among them.
    fillers : sequence of LayerFiller
        Bring the stored KV of a layer, in this order, before its fresh rows are written.
    final_layer : int or None
        The model's last layer where only the last row's logits are wanted. Nothing uses what attention gives the other
        rows there, so it is not computed.
    key_positions : Tensor or None
        int64 ``[N]``, ascending: positions of the visible keys where they are not their places in the cache.

    Attributes
    ----------
    kv_dtype : torch.dtype or None
        The cache's dtype where it is not the model's: fresh rows are rounded to it. None rounds nothing.
    """

    kv_dtype: torch.dtype | None = None

    def __init__(
        self,
        rows: Tensor,
        visible: int | Tensor,
        fillers: Sequence[LayerFiller] = (),
        final_layer: int | None = None,
        key_positions: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.visible = visible
        self.fillers = fillers
        if isinstance(visible, int):
            self.plan = RowPlan(rows, visible)
        else:
            self.plan = RowPlan(torch.searchsorted(visible, rows), visible.shape[0])
        self.num_rows = self.plan.num_rows
        self.final_layer = final_layer if self.num_rows > 1 else None
        self.final_rows = None if self.final_layer is None else slice(-1, None)
        self.key_positions = key_positions if key_positions is not None or isinstance(visible, int) else visible
        self.begin()
        self._plans: dict[MaskRule, tuple[RowPlan, RowPlan]] = {}
        self._flat: dict[int, Tensor] = {}

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """See a layer's fresh rows ``[1, Hkv, R, D]`` before they are written.

        Returns
        -------
        Tensor or None
            int64 indices of the rows to write; None for all.
        """
        return None

    def seen(self, part: Tensor) -> Tensor:
        """Return what attention sees of a layer's keys or values ``[1, Hkv, capacity, D]``."""
        if isinstance(self.visible, int):
            return part[:, :, : self.visible]
        _, heads, capacity, dim = part.shape
        if not part.is_contiguous():
            return part.index_select(2, self.visible)
        if heads not in self._flat:
            # On CPUs, rows of one matrix are picked two to three times faster than positions within each head.
            first = torch.arange(heads, device=part.device)[:, None] * capacity
            self._flat[heads] = (first + self.visible).flatten()
        return part.view(heads * capacity, dim).index_select(0, self._flat[heads]).view(1, heads, -1, dim)

    def plans(self, mask: MaskRule) -> tuple[RowPlan, RowPlan]:
        """Return which keys all rows see under a mask, and which the last row sees."""
        if mask not in self._plans:
            self._plans[mask] = self._planned(mask)
        return self._plans[mask]

    def _planned(self, mask: MaskRule) -> tuple[RowPlan, RowPlan]:
        plan, own = self.plan, self.plan.q_positions
        keys = torch.arange(plan.num_keys, device=own.device) if self.key_positions is None else self.key_positions
        first = mask.first_keys(keys[own], keys, own)
        if first is not None:
            plan = RowPlan(own, plan.num_keys, first_keys=first)
        last = plan
        if self.final_layer is not None:
            last = RowPlan(own[-1:], plan.num_keys, first_keys=None if first is None else first[-1:])
        return plan, last

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[B, Hq, R, Dv]`` of queries ``[B, Hq, R, D]``, or end the forward."""
        every, last = self.plans(rule.mask)
        if q.shape[2] < every.num_rows:
            # Behind the last layer with KV of its own some models go on with the last row, if no more is wanted.
            return rule.attention(q, k, v, last)
        if layer_idx != self.final_layer:
            return rule.attention(q, k, v, every)
        output = q.new_zeros(*q.shape[:3], v.shape[3])
        output[:, :, -1:] = rule.attention(q[:, :, -1:], k, v, last)
        return output


class KVPass(ForwardPass):
    """A forward pass that is run for its keys and values only: it ends once those of the last layer that has any are.

    Parameters
    ----------
    rows, visible
        As :class:`ForwardPass` takes them.
    last_layer : int
    """

    def __init__(self, rows: Tensor, visible: int, last_layer: int) -> None:
        super().__init__(rows, visible)
        self.last_layer = last_layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output, or end the forward."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, rule)
