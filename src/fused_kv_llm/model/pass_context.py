"""What one forward pass does with its rows: the only thing that a cache and an attention function ask.

transformers hands keyword arguments on to attention in most models, but not in all, and to a cache in none. So the pass
that a thread runs is a context variable: :func:`running` sets it, :func:`current_pass` reads it, and there is no other
way to reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, row_attention
from fused_kv_llm.errors import FusedKVError

__all__ = ["ForwardPass", "KVPass", "LayerFiller", "StopForwardError", "current_pass", "required_pass", "running"]


class StopForwardError(Exception):
    """Ends a forward that has brought what it was run for.

    An exception, since the loop over the layers is transformers' own: a shorter list of layers would do as well, but
    the model has one list for all threads.
    """


class LayerFiller(Protocol):
    """Brings stored KV into a request's cache."""

    def fill(self, layer_idx: int) -> None:
        """Have the layer's stored KV in place; called again for the same layer, do nothing."""


class ForwardPass:
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
    """

    def __init__(
        self,
        rows: Tensor,
        visible: int | Tensor,
        fillers: Sequence[LayerFiller] = (),
        final_layer: int | None = None,
    ) -> None:
        self.rows = rows
        self.visible = visible
        self.fillers = fillers
        if isinstance(visible, int):
            self.plan = RowPlan(rows, visible)
        else:
            self.plan = RowPlan(torch.searchsorted(visible, rows), visible.shape[0])
        self.final_layer = final_layer if self.plan.num_rows > 1 else None
        self._last_row = self.plan
        if self.final_layer is not None:
            self._last_row = RowPlan(self.plan.q_positions[-1:], self.plan.num_keys)
        self._flat: Tensor | None = None

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
        if self._flat is None:
            # On CPUs, rows of one matrix are picked two to three times faster than positions within each head.
            first = torch.arange(heads, device=part.device)[:, None] * capacity
            self._flat = (first + self.visible).flatten()
        return part.view(heads * capacity, dim).index_select(0, self._flat).view(1, heads, -1, dim)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[B, Hq, R, D]`` of queries ``[B, Hq, R, D]``, or end the forward."""
        if layer_idx != self.final_layer:
            return row_attention(q, k, v, self.plan, scale)
        output = torch.zeros_like(q)
        output[:, :, -1:] = row_attention(q[:, :, -1:], k, v, self._last_row, scale)
        return output


class KVPass(ForwardPass):
    """A forward pass that is run for its keys and values only: it ends once the last layer's are there.

    Parameters
    ----------
    rows, visible
        As :class:`ForwardPass` takes them.
    last_layer : int
    """

    def __init__(self, rows: Tensor, visible: int, last_layer: int) -> None:
        super().__init__(rows, visible)
        self.last_layer = last_layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output, or end the forward."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        return super().attend(layer_idx, q, k, v, scale)


_current: ContextVar[ForwardPass | None] = ContextVar("fused_kv_pass", default=None)


def current_pass() -> ForwardPass | None:
    """Return the pass that is being run here; None in a user's own forward, and while a model is compiled."""
    return None if torch.compiler.is_compiling() else _current.get()


def required_pass() -> ForwardPass:
    """Return the pass that is being run here.

    Raises
    ------
    FusedKVError
        If there is none: what was called takes part in fused passes only.
    """
    found = current_pass()
    if found is None:
        raise FusedKVError(
            "A cache of the engine was given to a forward of its own: it works in the engine's passes only."
        )
    return found


@contextmanager
def running(forward_pass: ForwardPass) -> Iterator[None]:
    """Make a pass the current one of what is called inside."""
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)
