"""Rows that leave a forward pass between two layers.

transformers runs all layers over the rows it began with. A hook before each layer takes those rows out of the hidden
states and of the rotation's tables that the pass has dropped, so that from there on they cost nothing. Where only the
last row's logits are wanted, that row goes on alone behind the last layer with KV of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan
from fused_kv_llm.model.forward_pass import ForwardPass, LayerFiller
from fused_kv_llm.model.pass_context import current_pass
from fused_kv_llm.model.seam import decoder_layers

__all__ = ["NarrowingPass", "attach_narrowing", "narrow_rows"]


class NarrowingPass(ForwardPass):
    """A forward pass that drops rows on its way through the layers.

    Parameters
    ----------
    rows : Tensor
        int64 ``[R]``, ascending: prompt positions. The last one stays to the end.
    num_tokens : int
        Tokens of the prompt.
    fillers : sequence of LayerFiller
    final_layer : int
        The model's last layer; only the last row's logits are wanted.
    """

    def __init__(self, rows: Tensor, num_tokens: int, fillers: Sequence[LayerFiller], final_layer: int) -> None:
        super().__init__(rows, num_tokens, fillers, final_layer)
        self._kept = torch.arange(rows.shape[0], device=rows.device)
        self._next: Tensor | None = None
        self._narrowed: dict[int, tuple[Any, Any]] = {}

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows before the next layer.

        Parameters
        ----------
        rows : Tensor
            int64, ascending indices of the present rows.
        """
        self._next = rows

    def narrow(self, hidden: Tensor) -> Tensor:
        """Return a layer's hidden states ``[..., rows of the last layer, hidden size]`` without the rows dropped."""
        # A model that went on with its last row alone has no others to drop.
        if self._next is None or hidden.shape[-2] != self.rows.shape[0]:
            return hidden
        hidden = self.residual.narrow(hidden, self._next)
        self.rows, self._kept, self._next = self.rows[self._next], self._kept[self._next], None
        self.plan = RowPlan(self.rows, self.plan.num_keys)
        self._plans.clear()
        self._narrowed.clear()
        return hidden

    def of_rows(self, value: Any) -> Any:
        """Return what a layer is told of all rows the pass began with, for the present ones only.

        Parameters
        ----------
        value : object
            Positions ``[..., R]``, tables ``[..., R, D]``, or tuples of them; anything else stays as it is.
        """
        if isinstance(value, tuple):
            return tuple(self.of_rows(part) for part in value)
        axis = None if self._kept.shape[0] == self.num_rows else _axis_of_rows(value, self.num_rows)
        if axis is None:
            return value
        # Layers share their tables.
        if id(value) not in self._narrowed:
            self._narrowed[id(value)] = value, value.index_select(axis, self._kept)
        return self._narrowed[id(value)][1]


def _axis_of_rows(value: Any, rows: int) -> int | None:
    """Return along which axis a value is of `rows` rows: positions ``[..., R]``, tables ``[..., R, D]``."""
    if not isinstance(value, Tensor):
        return None
    axis = -2 if value.is_floating_point() or value.is_complex() else -1
    return axis if value.dim() >= -axis and value.shape[axis] == rows else None


def attach_narrowing(model: Any) -> None:
    """Let rows leave a model's forward where the pass drops them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of a verified architecture. Attaching it again changes nothing.
    """
    for layer in decoder_layers(model):
        if narrow_rows not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(narrow_rows, with_kwargs=True)


def narrow_rows(
    module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
    """Take the rows that the pass has dropped out of what a layer is given; None leaves it as it is.

    The hook before every layer. It does nothing in passes that drop no rows.
    """
    forward_pass = current_pass()
    if isinstance(forward_pass, ForwardPass) and forward_pass.final_layer is not None and _has_no_kv(module):
        rows = forward_pass.num_rows
        others = tuple(_last_of(value, rows) for value in inputs[1:])
        cut = {name: _last_of(value, rows) for name, value in options.items()}
        return (inputs[0][..., -1:, :], *others), cut
    if not isinstance(forward_pass, NarrowingPass):
        return None
    hidden = forward_pass.narrow(inputs[0])
    others = tuple(forward_pass.of_rows(value) for value in inputs[1:])
    return (hidden, *others), {name: forward_pass.of_rows(value) for name, value in options.items()}


def _has_no_kv(layer: Any) -> bool:
    # transformers' name for it. Layers that call it otherwise compute all rows, which takes longer and gives the same.
    return bool(getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False))


def _last_of(value: Any, rows: int) -> Any:
    """Return what a layer is told of `rows` rows for the last one."""
    if isinstance(value, tuple):
        return tuple(_last_of(part, rows) for part in value)
    axis = _axis_of_rows(value, rows)
    return value if axis is None else value.narrow(axis, -1, 1)
