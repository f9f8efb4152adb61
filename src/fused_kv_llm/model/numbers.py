"""Values that are not numbers: found, and the layer named that they come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_llm.errors import UnsupportedModelError

__all__ = ["check_logits", "check_numbers"]


def check_numbers(
    layers: Sequence[tuple[Tensor, Tensor]], model_id: str, dtype: torch.dtype, rows: Tensor | None = None
) -> None:
    """Make sure that keys and values are numbers.

    Parameters
    ----------
    layers : sequence of (Tensor, Tensor)
        Keys ``[..., N, D]`` and values ``[..., N, Dv]`` by layer.
    model_id : str
        The model's name, for messages.
    dtype : torch.dtype
        What it computes in.
    rows : Tensor or None
        int64: which of the ``N`` to look at; None for all.

    Raises
    ------
    UnsupportedModelError
        If one is not a number; it names the first such layer.
    """
    for number, pair in enumerate(layers):
        for part in pair:
            seen = part if rows is None else part.index_select(-2, rows)
            # NaN and infinity show in the smallest and the largest value, which are found many times faster.
            if seen.numel() and not all(bool(extreme.isfinite()) for extreme in seen.aminmax()):
                raise _not_a_number(f"layer {number}, whose keys or values are not", model_id, dtype)


def check_logits(
    logits: Tensor, layers: Sequence[tuple[Tensor, Tensor]], model_id: str, dtype: torch.dtype, rows: Tensor
) -> None:
    """Make sure that logits are numbers; minus infinity, which rules a token out, is one.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocabulary]``.
    layers, model_id, dtype, rows
        As :func:`check_numbers` takes them: where to look for the cause.

    Raises
    ------
    UnsupportedModelError
    """
    if bool(logits.isnan().any()):
        check_numbers(layers, model_id, dtype, rows)
        raise _not_a_number("its output: the keys and values of all layers are numbers", model_id, dtype)


def _not_a_number(where: str, model_id: str, dtype: torch.dtype) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model {model_id!r} computes values that are not numbers, from {where}. Nothing was stored or answered. "
        f"Its weights are damaged, or too large for {str(dtype).removeprefix('torch.')}: try dtype='bfloat16' or "
        "'float32'."
    )
