"""Row attention over pages: requests share one copy of a chunk's KV."""

from __future__ import annotations

from torch import Tensor

from .dispatch import refuse_in_triton, triton_op, use_triton
from .pages import PageTable
from .reference_paged import paged_row_attention_reference

__all__ = ["paged_row_attention"]

# Whole pages of keys and values have to fit into shared memory.
_LARGEST_DIM = 256


def paged_row_attention(
    q: Tensor, page_keys: Tensor, page_values: Tensor, table: PageTable, q_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend each request's rows to its pages, causal by true position.

    FusionRAG section 4.3. Keys of a shared page are rotated on the way to the product by the distance at which this
    request has them; entries that the request has recomputed are those of its own pages.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``, rotated to their positions. One row each is decoding.
    page_keys, page_values : Tensor
        ``[pages, Hkv, page_size, D]``, half-split rotary layout.
    table : PageTable
        The requests' pages, its slots taken for the rows' own keys and those written.
    q_positions : Tensor
        int64 ``[R]`` or ``[B, R]``.
    scale : float
        Multiplies the scores; positive.

    Returns
    -------
    tuple of Tensor
        Attention ``[B, Hq, R, D]`` in the dtype of `q` and the log-sum-exp, float32 ``[B, Hq, R]``. A row at a
        negative position is padding: zero and minus infinity.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or the table names a page that is not there.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    batch, q_heads, rows, dim = q.shape
    _, kv_heads, page_size, page_dim = page_keys.shape
    fits = page_keys.shape == page_values.shape and page_dim == dim and kv_heads > 0 and q_heads % kv_heads == 0
    fits = fits and page_size == table.page_size and table.pages.shape[0] == batch
    if not fits or q_positions.shape not in ((rows,), (batch, rows)) or 2 * table.cos.shape[-1] > dim:
        msg = (
            f"q {list(q.shape)}, pages {list(page_keys.shape)} and {list(page_values.shape)}, q_positions "
            f"{list(q_positions.shape)} and a table of {list(table.pages.shape)} pages of {table.page_size} slots "
            "do not fit together"
        )
        raise ValueError(msg)
    if table.largest_page >= page_keys.shape[0]:
        msg = f"the table names page {table.largest_page}, but there are {page_keys.shape[0]} pages"
        raise ValueError(msg)
    if use_triton("paged row attention", q_positions, table.pages, q=q, k=page_keys, v=page_values):
        if dim > _LARGEST_DIM:
            reason = f"because heads over pages may have at most {_LARGEST_DIM} dimensions"
            refuse_in_triton("paged row attention", reason, q=q, k=page_keys, v=page_values)
        out, lse = triton_op("paged_rows", q.device)(q, page_keys, page_values, table, q_positions, scale)
        return out, lse
    return paged_row_attention_reference(q, page_keys, page_values, table, q_positions, scale)
