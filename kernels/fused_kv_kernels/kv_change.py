"""What a prompt changes in a chunk's KV: summed up over prompts with weights, then kept in eight bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import use_triton
from .native import native_add_change, native_compress_rows, supports, takes_rows
from .rotate import RotationTable, rerotate_keys

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
        If the tensors do not fit together.
    UnsupportedOperandsError
        If no kernel takes the keys on their device.
    """
    _check(sums, after, before, tables)
    is_first = sums is None
    total = torch.empty(after.shape, dtype=torch.float32, device=after.device) if sums is None else sums
    alike = all(table is tables[0] for table in tables)
    for span in (slice(None),) if alike else [slice(at, at + 1) for at in range(len(tables))]:
        table = tables[span.start or 0] if tables else None
        _add(total[span], after[span], before[span], weight, table, is_first)
    return total


def _check(sums: Tensor | None, after: Tensor, before: Tensor, tables: Sequence[RotationTable]) -> None:
    fits = after.dim() == 4 and after.shape == before.shape and len(tables) in (0, after.shape[0])
    if sums is not None:
        fits = fits and sums.shape == after.shape and sums.dtype == torch.float32 and sums.is_contiguous()
    fits = fits and all(len(table) == 1 and 2 * table.half <= after.shape[3] for table in tables)
    others = [before, *tables, *(() if sums is None else (sums,))]
    if not fits or any(other.device != after.device for other in others):
        msg = (
            f"KV before {list(before.shape)} and after {list(after.shape)}, their sums in float32 and {len(tables)} "
            "rotation tables of one angle each, all on one device, do not fit together"
        )
        raise ValueError(msg)


def _add(
    total: Tensor, after: Tensor, before: Tensor, weight: float, table: RotationTable | None, is_first: bool
) -> None:
    dense = all(part.stride(2) == part.shape[3] for part in (after, before))
    native = dense and before.dtype in (after.dtype, torch.float32) and supports(after) and supports(before)
    if total.numel() and native and not use_triton("change of KV", after=after):
        native_add_change(total, after, before, weight, table, is_first=is_first)
        return
    turned = after.float() if table is None else rerotate_keys(after, table)
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
        Floating ``[..., D]``, of one dimension at least.

    Returns
    -------
    rows : Tensor
        int8 ``[..., D]``.
    scales : Tensor
        float32 ``[..., 1]``, by which they are multiplied.
    """
    wide = x.float().contiguous()
    if wide.numel() and takes_rows(wide):
        return native_compress_rows(wide, _SMALLEST_SCALE)
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (wide / scales).round().to(torch.int8), scales
