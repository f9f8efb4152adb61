"""Row attention in eight bits, for results that only correct others.

Queries, keys, weights and values are rounded to eight bits and multiplied as integers, as in SageAttention (Zhang et
al. 2024): keys after their mean is subtracted, which changes no softmax. Unlike there, weights are rounded too,
relative to the highest of their row among 64 keys, so that an attention sink leaves something of the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import eight_bit_attention_scratch, native_eight_bit_attention, processor_features, supports
from .row_attention import check_operands, row_attention
from .row_plan import RowPlan

__all__ = ["eight_bit_row_attention", "has_eight_bit_attention"]

# Packing the keys of a head costs as much as a few rows.
_LEAST_ROWS = 16


def eight_bit_row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return about what :func:`row_attention` returns, in less time where :func:`has_eight_bit_attention`.

    Elsewhere, with fewer than 16 rows of a key head, with a cap, with sinks or with a scale that is not positive, it is
    :func:`row_attention`. Keys and values are rounded 64 at a time, and all keys have one mean: a row's output depends
    a little on keys that it does not see. A query, key or value that is not finite makes all outputs that depend on it
    not finite, and maybe others of its head.

    Parameters
    ----------
    q, k, v, plan, scale, softcap, sinks
        As :func:`row_attention` takes them.

    Returns
    -------
    Tensor
        ``[B, Hq, R, Dv]`` in the dtype of `q`. The error is about two hundredths of the output's magnitude.

    Raises
    ------
    ValueError, UnsupportedOperandsError
        As :func:`row_attention`.
    """
    is_plain = softcap is None and sinks is None and scale > 0
    if is_plain and has_eight_bit_attention(q.dtype):
        check_operands(q, k, v, plan)
        if plan.num_rows * (q.shape[1] // k.shape[1]) >= _LEAST_ROWS and supports(q, k, v):
            scratch = plan.scratch(eight_bit_attention_scratch(q, k, v), torch.uint8)
            return native_eight_bit_attention(q, k, v, plan, scale, scratch)
    return row_attention(q, k, v, plan, scale, softcap=softcap, sinks=sinks)


def has_eight_bit_attention(dtype: torch.dtype) -> bool:
    """Return whether :func:`eight_bit_row_attention` has an operator of its own for a dtype here.

    The processor has to have AVX512-VNNI and AVX512-VBMI, and no AMX for the dtype, whose matrix products take less
    time than VNNI's; or AVX2 and no AVX-512, where keys and values are rounded to somewhat fewer steps.
    """
    if dtype == torch.bfloat16 and "amx_bf16" in processor_features():
        return False
    one = torch.empty(1, 1, 1, 2, dtype=dtype)
    return supports(one) and eight_bit_attention_scratch(one, one, one) >= 0
