"""Shift fit: how much of each chunk's shift holds in a prompt, by least squares over its recomputed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_fit_sums, supports, supports_rows
from .shift_chunks import ShiftStack
from .transfer import TransferPlan, check_fresh_rows

__all__ = ["fit_shifts"]

_LARGEST_FACTOR = 2.0


def fit_shifts(
    plan: TransferPlan,
    stack: ShiftStack,
    layer_idx: int,
    damping_tokens: float,
    fresh: tuple[Tensor, Tensor],
    layer: tuple[Tensor, Tensor],
) -> Tensor:
    """Return with what weight each chunk's shift is to be added once more, by least squares over its recomputed tokens.

    With the deviations ``d_i`` of a chunk's ``n`` recomputed tokens ``i``, fresh keys (or values) minus stored ones
    over all heads of a layer, and their shifts ``s_i``,

        weight = sum_i <d_i, s_i> / ((1 + m / n) sum_i <s_i, s_i>)

    where ``m`` keeps chunks with few recomputed tokens from trusting them (a ridge). It is cut to twice the weight that
    the shift has been added with.

    Parameters
    ----------
    plan : TransferPlan
        Its `selected` and `fresh_rows`.
    stack : ShiftStack
        The shifts, which the layer holds with the stack's own weights.
    layer_idx : int
        In the stack, whose rotation table of that layer is used.
    damping_tokens : float
        ``m``.
    fresh : tuple of Tensor
        Fresh keys ``[Hk, R, Dk]`` and values ``[Hv, R, Dv]``.
    layer : tuple of Tensor
        The layer's keys ``[Hk, N, Dk]`` and values ``[Hv, N, Dv]``, which the fresh rows have not replaced yet.

    Returns
    -------
    Tensor
        float32 ``[2, len(stack.shifts)]``, of keys and of values; 0 for a chunk without recomputed tokens.

    Raises
    ------
    ValueError
        If the shapes do not fit together or, on a CPU, a position or a row lies outside the tensors.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not stack.shifts:
        return stack.weights
    stack.check(layer_idx, *layer)
    check_fresh_rows(plan, fresh, layer, layer[0].shape[1])
    table = stack.tables[layer_idx]
    bounds = torch.searchsorted(plan.selected.contiguous(), stack.edges)
    operands = {"fresh_keys": fresh[0], "fresh_values": fresh[1], "layer_keys": layer[0], "layer_values": layer[1]}
    if use_triton("shift fit", plan.selected, plan.fresh_rows, table.cos, table.sin, **operands):
        sums = triton_op("fit_shifts", layer[0].device)(plan, stack, layer_idx, bounds, fresh, layer).sum(1)
    elif stack.entries is not None and supports(*fresh, *layer) and supports_rows(*layer):
        sums = native_fit_sums(stack.entries, layer_idx, table, plan, bounds, fresh, layer)
    else:
        sums = _sums_in_torch(plan, stack, layer_idx, bounds, fresh, layer)
    along, square = sums.view(-1, 2, 2).permute(2, 1, 0)
    count = bounds[:, 1] - bounds[:, 0]
    found = torch.nan_to_num(along / square * (count / (count + damping_tokens)), nan=0.0)
    limit = _LARGEST_FACTOR * stack.weights
    return torch.minimum(torch.maximum(found, -limit), limit)


def _sums_in_torch(
    plan: TransferPlan,
    stack: ShiftStack,
    layer_idx: int,
    bounds: Tensor,
    fresh: tuple[Tensor, Tensor],
    layer: tuple[Tensor, Tensor],
) -> Tensor:
    sums = []
    for number, (shift, (first, last)) in enumerate(zip(stack.shifts, bounds.tolist(), strict=True)):
        selected, rows = plan.selected[first:last], plan.fresh_rows[first:last]
        keys, values = (part.to(selected.device)[:, selected - shift.start] for part in shift.difference(layer_idx))
        keys = stack.turned(number, layer_idx, keys)
        for moved, new, old in zip((keys, values), fresh, layer, strict=True):
            deviation = new.index_select(1, rows).float() - old.index_select(1, selected).float()
            sums += [(deviation * moved).sum(), moved.square().sum()]
    return torch.stack(sums).view(len(stack.shifts), 4)
