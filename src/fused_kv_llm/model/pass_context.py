"""What one forward pass does with its rows: the only thing that a cache and an attention function ask.

transformers hands keyword arguments on to attention in most models, but not in all, and to a cache in none. So the pass
that a thread runs is a context variable: :func:`running` sets it, :func:`current_pass` reads it, and there is no other
way to reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fused_kv_kernels import LayerWeights, RowPlan
from fused_kv_llm.errors import FusedKVError, UnsupportedModelError
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.pausing import Pausing

__all__ = [
    "ForwardPass",
    "KVPass",
    "LayerFiller",
    "LayerPass",
    "StopForwardError",
    "current_pass",
    "required_pass",
    "running",
]


class StopForwardError(Exception):
    """Ends a forward that has brought what it was run for.

    An exception, since the loop over the layers is transformers' own: a shorter list of layers would do as well, but
    the model has one list for all threads.
    """


class LayerFiller(Protocol):
    """Brings stored KV into a request's cache."""

    def fill(self, layer_idx: int) -> None:
        """Have the layer's stored KV in place; called again for the same layer, do nothing."""


class LayerPass:
    """A forward through all layers of a model, whatever its rows are.

    The seam tells it of every layer, in order: that its keys are there (:meth:`enter_layer`), and that it attends
    (:meth:`run_attention`), to those or to what an earlier layer was given. A layer that does anything else computes
    its attention elsewhere, which is an error.

    Attributes
    ----------
    final_rows : slice, Tensor or None
        Rows whose logits are wanted: the last one, those listed (int64), or all (None). Nothing uses what the last
        layer makes of the others.
    num_rows : int
        Rows that the pass begins with.
    kv_layer : int
        Whose keys and values the layer that attends sees: its own, or those of an earlier one.
    decodes : bool
        Whether :meth:`run_layers` may run several layers at once.
    pausing : Pausing or None
        Set where the forward may be left between two layers.
    """

    final_rows: slice | Tensor | None = None
    num_rows: int
    kv_layer: int
    decodes: bool = False
    pausing: Pausing | None = None

    def begin(self) -> None:
        """Expect the first layer, or the one that the forward was left before."""
        if self.pausing is None or self.pausing.hidden is None:
            self.next_layer = 0
        self._is_entered = False
        # Weak, since what a layer sees may be a copy, which would be kept for all layers.
        self._given: list[ref[Tensor]] = []

    def enter_layer(self, layer_idx: int) -> None:
        """Note that a layer's keys and values are given to the cache.

        Raises
        ------
        UnsupportedModelError
            If the layer before it did not attend through the seam.
        """
        if layer_idx != self.next_layer or self._is_entered:
            raise _unreached(self.next_layer)
        self._is_entered = True

    def given(self, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Note what a cache gives a layer, keys and values ``[B, Hkv, N, D]``, and return it."""
        self._given.append(ref(seen[0]))
        return seen

    def run_attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Attend, as :meth:`attend` does, and note that the layer did.

        Raises
        ------
        UnsupportedModelError
            If the layer's keys are not those of the cache, or a layer was left out.
        """
        source = layer_idx if self._is_entered else self._layer_given(k)
        if layer_idx != self.next_layer or source is None:
            raise _unreached(self.next_layer)
        self.kv_layer = source
        self.next_layer, self._is_entered = layer_idx + 1, False
        return self.attend(layer_idx, q, k, v, rule)

    def run_layers(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Run the next layers, attention included, and note that they attended.

        Parameters
        ----------
        hidden : Tensor
            ``[1, R, H]``.
        layers : sequence of LayerWeights
        cos, sin : Tensor
            ``[1, R, rotary]``.
        rule : AttentionRule
            Of all of them.

        Returns
        -------
        Tensor
            ``[1, R, H]``.
        """
        if self._is_entered:
            raise _unreached(self.next_layer)
        left = self.decode(hidden, layers, cos, sin, rule)
        self.next_layer += len(layers)
        return left

    def _layer_given(self, keys: Tensor) -> int | None:
        return next((layer for layer, given in enumerate(self._given) if given() is keys), None)

    def check_complete(self, num_layers: int) -> None:
        """Make sure that every layer attended through the seam.

        Raises
        ------
        UnsupportedModelError
            If one did not.
        """
        if self.next_layer != num_layers:
            raise _unreached(self.next_layer)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[B, Hq, R, Dv]`` of queries ``[B, Hq, R, D]``, or end the forward."""
        raise NotImplementedError

    def decode(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return what :meth:`run_layers` returns, where the pass decodes."""
        raise NotImplementedError


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
    """

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


def _unreached(layer_idx: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Layer {layer_idx} of the model does not attend through the engine: its attention was patched, wrapped or "
        "exchanged, its class attends by itself or keeps its keys elsewhere, or the configuration names more layers "
        "than there are. Nothing was reused: this model cannot be fused as it is."
    )


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


_Pass = TypeVar("_Pass", bound=LayerPass)
_current: ContextVar[LayerPass | None] = ContextVar("fused_kv_pass", default=None)


def current_pass() -> LayerPass | None:
    """Return the pass that is being run here; None in a user's own forward, and while a model is compiled."""
    return None if torch.compiler.is_compiling() else _current.get()


def required_pass(kind: type[_Pass]) -> _Pass:
    """Return the pass that is being run here, which is of a given kind.

    Raises
    ------
    FusedKVError
        If there is none: what was called takes part in fused passes only.
    """
    found = current_pass()
    if not isinstance(found, kind):
        raise FusedKVError(
            "A cache of the engine was given to a forward of its own: it works in the engine's passes only."
        )
    return found


@contextmanager
def running(forward_pass: LayerPass) -> Iterator[None]:
    """Make a pass the current one of what is called inside."""
    forward_pass.begin()
    token = _current.set(forward_pass)
    try:
        yield
    finally:
        _current.reset(token)
