"""What a prompt changes in a chunk's KV: summed up over prompts with weights, then kept in eight bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .native import native_add_change, native_compress_rows, supports, takes_rows
from .rotate import RotationTable, rotate_in_torch

__all__ = ["add_change", "compress_rows"]

_LARGEST = 127
_SMALLEST_SCALE = 1e-30


def add_change(
    sums: Tensor | None, after: Tensor, before: Tensor, weight: float, tables: Sequence[RotationTable] = ()
) -> Tensor:
    """Add ``weight * (after - before)`` to sums, in float32.

    Parameters
    ----------
    sums : Tensor or None
        float32 ``[L, H, T, D]``, dense; changed in place. None begins new ones.
    after, before : Tensor
        ``[L, H, T, D]``.
    weight : float
    tables : sequence of RotationTable
        By what `after` is rotated first: of one angle, one for each layer, the same one where layers rotate alike.
        Without any it is not rotated.

    Returns
    -------
    Tensor
        The sums.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    layers = after.shape[0]
    fits = after.dim() == 4 and after.shape == before.shape and len(tables) in (0, layers)
    fits = fits and (sums is None or (sums.shape == after.shape and sums.is_contiguous()))
    if not fits or any(len(table) != 1 or 2 * table.half > after.shape[3] for table in tables):
        msg = (
            f"KV before {list(before.shape)} and after {list(after.shape)}, their sums and {len(tables)} rotation "
            "tables of one angle each do not fit together"
        )
        raise ValueError(msg)
    is_first = sums is None
    total = torch.empty(after.shape, dtype=torch.float32, device=after.device) if sums is None else sums
    # Both in float32 where one of them is: nothing is rounded.
    after = after if after.dtype == before.dtype else after.to(torch.promote_types(after.dtype, before.dtype))
    before = before.to(after.dtype)
    alike = all(table is tables[0] for table in tables)
    for span in (slice(None),) if alike else [slice(at, at + 1) for at in range(layers)]:
        table = tables[span.start or 0] if tables else None
        _add(total[span], after[span], before[span], weight, table, is_first)
    return total


def _add(
    total: Tensor, after: Tensor, before: Tensor, weight: float, table: RotationTable | None, is_first: bool
) -> None:
    dense = all(part.stride(2) == part.shape[3] for part in (after, before))
    if total.numel() and dense and total.is_cpu and supports(after, before):
        native_add_change(total, after, before, weight, table, is_first=is_first)
        return
    turned = after.float() if table is None else rotate_in_torch(after, table.cos, table.sin, table.interleaved)
    change = turned - before.float()
    if is_first:
        torch.mul(change, weight, out=total)
    else:
        total.add_(change, alpha=weight)


def compress_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in eight bits, each scaled by its own largest element.

    Parameters
    ----------
    x : Tensor
        float32 ``[..., D]``.

    Returns
    -------
    rows : Tensor
        int8 ``[..., D]``.
    scales : Tensor
        float32 ``[..., 1]``, by which they are multiplied.
    """
    if x.numel() and x.is_contiguous() and x.dtype == torch.float32 and takes_rows(x):
        return native_compress_rows(x, _SMALLEST_SCALE)
    scales = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (x / scales).round().to(torch.int8), scales
