"""Deviation transfer: the mean deviation of a chunk's recomputed tokens, added to the stored KV of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_transfer, supports, supports_rows
from .rotate import RotationTable, rotate_in_torch

__all__ = ["TransferPlan", "deviation_vectors", "transfer_deviation"]


@dataclass(frozen=True)
class TransferPlan:
    """What is the same in all layers of one forward pass.

    Parameters
    ----------
    selected : Tensor
        int64 ``[n]``: the recomputed positions of chunks, ascending.
    fresh_rows : Tensor
        int64 ``[n]``: their rows among the pass's fresh keys and values.
    spans : Tensor
        int64 ``[K, 2]``: the positions ``[start, stop)`` of the chunks, ascending, disjoint. Every selected position
        lies in one of them.
    weights : Tensor
        float32 ``[K]``: what the sum of a chunk's deviations is multiplied by.
    """

    selected: Tensor
    fresh_rows: Tensor
    spans: Tensor
    weights: Tensor

    @cached_property
    def extents(self) -> tuple[tuple[int, int] | None, ...]:
        """Smallest and largest of `selected`, `fresh_rows` and `spans`; None where there are none."""
        parts = (self.selected, self.fresh_rows, self.spans)
        return tuple((int(part.min()), int(part.max())) if part.numel() else None for part in parts)

    @property
    def bounds(self) -> Tensor:
        """int64 ``[K + 1]``: where the chunks begin among the selected positions."""
        edges = torch.cat((self.spans[:, 0], self.spans[-1:, 1]))
        return torch.searchsorted(self.selected.contiguous(), edges)


def transfer_deviation(
    plan: TransferPlan,
    table: RotationTable,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    totals: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Correct one layer in place, given its fresh rows before they replace the stored ones.

    For a chunk with selected positions ``i`` and weight ``w``, every position ``j`` of its span gets

        K_j += R(p_j) w sum_i R(-p_i) (K_i' - K_i),    V_j += w sum_i (V_i' - V_i)

    Parameters
    ----------
    plan : TransferPlan
    table : RotationTable
        The layer's, a row for each position of the prompt: :func:`fused_kv_kernels.rotation_table` of all positions.
    fresh_keys, fresh_values : Tensor
        ``[Hk, R, Dk]`` and ``[Hv, R, Dv]``.
    layer_keys, layer_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``, changed in place.
    totals : tuple of Tensor, optional
        float32 ``[Hk, K, Dk]`` and ``[Hv, K, Dv]``, dense: what :func:`deviation_vectors` returns is added to them.

    Raises
    ------
    ValueError
        If the shapes do not fit together or, on a CPU, a position or a row lies outside the tensors.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    stored = (layer_keys, layer_values)
    operands = {"fresh_keys": fresh_keys, "fresh_values": fresh_values}
    operands |= {"layer_keys": layer_keys, "layer_values": layer_values}
    indices = (plan.selected, plan.fresh_rows, plan.spans, plan.weights, table.cos, table.sin)
    # A cache has room behind the prompt, which a table of the prompt's positions does not reach.
    _check_fresh_rows(plan, (fresh_keys, fresh_values), stored, len(table))
    if 2 * table.half > layer_keys.shape[2]:
        msg = f"a rotation table {list(table.cos.shape)} and keys {list(layer_keys.shape)} do not fit together"
        raise ValueError(msg)
    if totals is not None:
        _check_totals(plan, totals, stored)
    on_triton = use_triton("deviation transfer", *indices, **operands)
    if not on_triton and supports(fresh_keys, fresh_values, *stored) and supports_rows(*stored):
        native_transfer(plan, table, fresh_keys, fresh_values, layer_keys, layer_values, totals)
        return
    if totals is not None:
        added = deviation_vectors(plan, table, (fresh_keys, fresh_values), stored)
        for total, more in zip(totals, added, strict=True):
            total.add_(more)
    if on_triton:
        triton_op("transfer_deviation", layer_keys.device)(plan, table, *operands.values())
    else:
        _in_torch(plan, table, (fresh_keys, fresh_values), stored)


def _check_totals(plan: TransferPlan, totals: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
    for total, layer in zip(totals, stored, strict=True):
        shape = layer.shape[0], plan.spans.shape[0], layer.shape[2]
        fits = (total.shape, total.dtype, total.device) == (shape, torch.float32, layer.device)
        if not fits or not total.is_contiguous():
            msg = f"totals {total.dtype} {list(total.shape)} on {total.device} must be dense float32 {list(shape)}"
            raise ValueError(msg)


def _in_torch(
    plan: TransferPlan, table: RotationTable, fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]
) -> None:
    layer_keys, layer_values = stored
    keys, values = deviation_vectors(plan, table, fresh, stored)
    for chunk, (start, stop) in enumerate(plan.spans.tolist()):
        span = table.rows(slice(start, stop))
        moved = keys[:, chunk : chunk + 1].expand(-1, stop - start, -1)
        turned = rotate_in_torch(moved, span.cos, span.sin, span.interleaved)
        layer_keys[:, start:stop] += turned.to(layer_keys.dtype)
        layer_values[:, start:stop] += values[:, chunk : chunk + 1].to(layer_values.dtype)


def deviation_vectors(
    plan: TransferPlan, table: RotationTable, fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what :func:`transfer_deviation` adds to each chunk, in torch and without adding it.

    Parameters
    ----------
    plan : TransferPlan
    table : RotationTable
        The layer's, a row for each position of the prompt.
    fresh, stored : tuple of Tensor
        Keys and values of the pass's rows ``[H, R, D]``, and of the layer ``[H, N, D]``.

    Returns
    -------
    tuple of Tensor
        float32 ``[Hk, K, Dk]``, to be rotated to a token's position and added to its key, and ``[Hv, K, Dv]``.
    """
    counts = plan.bounds.diff()
    chunk_of = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)

    def summed(deviation: Tensor) -> Tensor:
        total = torch.zeros(deviation.shape[0], counts.shape[0], deviation.shape[2], device=deviation.device)
        return total.index_add_(1, chunk_of, deviation) * plan.weights[None, :, None]

    def deviation(new: Tensor, layer: Tensor) -> Tensor:
        return new.index_select(1, plan.fresh_rows).float() - layer.index_select(1, plan.selected).float()

    back = table.rows(plan.selected).inverse()
    keys = rotate_in_torch(deviation(fresh[0], stored[0]), back.cos, back.sin, back.interleaved)
    return summed(keys), summed(deviation(fresh[1], stored[1]))


def _check_fresh_rows(
    plan: TransferPlan, fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], positions: int
) -> None:
    """Refuse operands that do not fit together; of positions, those less than `positions` may be selected."""
    rows, length = fresh[0].shape[1], stored[0].shape[1]
    fits = fresh[1].shape[1] == rows and stored[1].shape[1] == length
    fits = fits and all(
        (x.shape[0], x.shape[2]) == (y.shape[0], y.shape[2]) for x, y in zip(fresh, stored, strict=True)
    )
    # On a GPU, looking at positions would wait for it.
    most = min(length, positions)
    inside = stored[0].device.type != "cpu" or all(
        extent is None or (extent[0] >= 0 and extent[1] <= last)
        for extent, last in zip(plan.extents, (most - 1, rows - 1, most), strict=True)
    )
    if not fits or not inside:
        shapes = [[list(part.shape) for part in pair] for pair in (fresh, stored)]
        msg = (
            f"fresh keys and values {shapes[0]}, a layer's {shapes[1]}, {positions} positions and chunks "
            f"{plan.spans.tolist()} do not fit together"
        )
        raise ValueError(msg)
