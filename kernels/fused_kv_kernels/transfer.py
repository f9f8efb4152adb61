"""Deviation transfer: the mean deviation of a chunk's recomputed tokens, added to the stored KV of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_transfer, supports, supports_rows
from .rotate import rotate_in_torch

__all__ = ["TransferPlan", "check_transfer", "transfer_deviation"]


@dataclass(frozen=True, slots=True)
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
    cos, sin : Tensor
        float32 ``[N, rotary / 2]``: :func:`fused_kv_kernels.rotation_tables` of all positions.
    """

    selected: Tensor
    fresh_rows: Tensor
    spans: Tensor
    weights: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def bounds(self) -> Tensor:
        """int64 ``[K + 1]``: where the chunks begin among the selected positions."""
        edges = torch.cat((self.spans[:, 0], self.spans[-1:, 1]))
        return torch.searchsorted(self.selected.contiguous(), edges)


def transfer_deviation(
    plan: TransferPlan, fresh_keys: Tensor, fresh_values: Tensor, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Correct one layer in place, given its fresh rows before they replace the stored ones.

    For a chunk with selected positions ``i`` and weight ``w``, every position ``j`` of its span gets

        K_j += R(p_j) w sum_i R(-p_i) (K_i' - K_i),    V_j += w sum_i (V_i' - V_i)

    Parameters
    ----------
    plan : TransferPlan
    fresh_keys, fresh_values : Tensor
        ``[Hkv, R, D]``.
    layer_keys, layer_values : Tensor
        ``[Hkv, N, D]``, changed in place.

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
    indices = (plan.selected, plan.fresh_rows, plan.spans, plan.weights, plan.cos, plan.sin)
    if use_triton("deviation transfer", *indices, **operands):
        triton_op("transfer_deviation", layer_keys.device)(plan, *operands.values())
        return
    check_transfer(plan, fresh_keys, fresh_values, layer_keys, layer_values)
    if supports(fresh_keys, fresh_values, *stored) and supports_rows(*stored):
        native_transfer(plan, fresh_keys, fresh_values, layer_keys, layer_values)
        return
    counts = plan.bounds.diff()
    chunk_of = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)

    def summed(deviation: Tensor) -> Tensor:
        total = torch.zeros(deviation.shape[0], counts.shape[0], deviation.shape[2], device=deviation.device)
        return total.index_add_(1, chunk_of, deviation) * plan.weights[None, :, None]

    def deviation(fresh: Tensor, layer: Tensor) -> Tensor:
        return fresh.index_select(1, plan.fresh_rows).float() - layer.index_select(1, plan.selected).float()

    to_zero = (plan.cos[plan.selected], -plan.sin[plan.selected])
    keys = summed(rotate_in_torch(deviation(fresh_keys, layer_keys), *to_zero))
    values = summed(deviation(fresh_values, layer_values))
    for chunk, (start, stop) in enumerate(plan.spans.tolist()):
        turned = rotate_in_torch(
            keys[:, chunk : chunk + 1].expand(-1, stop - start, -1), plan.cos[start:stop], plan.sin[start:stop]
        )
        layer_keys[:, start:stop] += turned.to(layer_keys.dtype)
        layer_values[:, start:stop] += values[:, chunk : chunk + 1].to(layer_values.dtype)


def check_transfer(
    plan: TransferPlan, fresh_keys: Tensor, fresh_values: Tensor, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Refuse operands that do not fit together.

    Raises
    ------
    ValueError
        If a shape does not fit or, on a CPU, a position or a row lies outside the tensors.
    """
    heads, length, dim = layer_keys.shape
    shapes_fit = layer_keys.shape == layer_values.shape and fresh_keys.shape == fresh_values.shape
    shapes_fit = shapes_fit and (fresh_keys.shape[0], fresh_keys.shape[2]) == (heads, dim)
    # A cache has room behind the prompt, which tables of the prompt's positions do not reach. On a GPU, looking at
    # positions would wait for it.
    on_cpu = layer_keys.device.type == "cpu"
    most = min(length, plan.cos.shape[0])
    inside = not on_cpu or all(
        part.numel() == 0 or (int(part.min()) >= 0 and int(part.max()) <= last)
        for part, last in ((plan.selected, most - 1), (plan.fresh_rows, fresh_keys.shape[1] - 1), (plan.spans, most))
    )
    if not shapes_fit or not inside or plan.cos.shape != plan.sin.shape or 2 * plan.cos.shape[1] > dim:
        msg = (
            f"fresh rows {list(fresh_keys.shape)}, a layer {list(layer_keys.shape)}, tables {list(plan.cos.shape)} and "
            f"chunks {plan.spans.tolist()} do not fit together"
        )
        raise ValueError(msg)
