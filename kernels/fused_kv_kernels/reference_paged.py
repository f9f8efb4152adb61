"""Row attention over pages in plain torch: gather, rotate, attend."""

from __future__ import annotations

import torch
from torch import Tensor

from .pages import HIDDEN, PageTable
from .reference import batched_row_attention_reference
from .rotate import rotate_in_torch

__all__ = ["paged_row_attention_reference"]


def paged_row_attention_reference(
    q: Tensor, page_keys: Tensor, page_values: Tensor, table: PageTable, q_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend each request's rows to its pages; see :func:`fused_kv_kernels.paged_row_attention`.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    page_keys, page_values : Tensor
        ``[pages, Hkv, page_size, D]``.
    table : PageTable
    q_positions : Tensor
        int64 ``[R]`` or ``[B, R]``.
    scale : float
        Multiplies the scores.

    Returns
    -------
    tuple of Tensor
        ``[B, Hq, R, D]`` in the dtype of `q` and float32 ``[B, Hq, R]``.
    """
    batch, pages = table.pages.shape

    def gathered(part: Tensor) -> Tensor:
        """``[B, Hkv, P * page_size, D]``."""
        return part[table.pages].transpose(1, 2).reshape(batch, part.shape[1], pages * table.page_size, part.shape[3])

    cos, sin = (part.repeat_interleave(table.page_size, dim=1)[:, None] for part in (table.cos, table.sin))
    keys = rotate_in_torch(gathered(page_keys), cos, sin)
    # What a request does not see stands beyond all that it asks from.
    beyond = torch.iinfo(torch.int64).max
    stands = table.positions.masked_fill(table.positions == HIDDEN, beyond)
    return batched_row_attention_reference(q, keys, gathered(page_values), q_positions, scale, kv_positions=stands)
