"""An estimate, made while a prompt is fused, of how far its answer will be from full prefill's.

What is wrong with fused KV is the stored KV of the tokens that are not recomputed, as far as the question attends to
it. How much attention that is, the probe says. How wrong stored KV is in this prompt, the recomputed tokens show: by
how much their fresh values differ from the stored ones, after the context shift has been added. Both have to be large
for an answer to be far off, so they are multiplied. The product has no unit, says nothing across models, and is a hint
only: docs/quality.md has its rank correlation with the true divergence.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DeviationMeter", "expected_divergence", "uncovered_attention"]


def uncovered_attention(scores: Tensor, chunk_positions: Tensor, selected: Tensor) -> float:
    """Return the attention that the question gives to stored KV that stays as it is, mean over its tokens.

    Parameters
    ----------
    scores : Tensor
        float32 ``[C]``, the attention each chunk token receives, mean over heads, layers and the question's tokens.
    chunk_positions : Tensor
        int64 ``[C]``, ascending: their positions.
    selected : Tensor
        int64: those that are recomputed.
    """
    return float(scores[~torch.isin(chunk_positions, selected)].sum())


class DeviationMeter:
    """Measures how far recomputed values are from the stored ones, in the last third of the layers.

    There stored KV is furthest off, and the estimate follows the true divergence best.

    Parameters
    ----------
    num_layers : int
    """

    def __init__(self, num_layers: int) -> None:
        self._first = 2 * num_layers // 3
        self._by_layer: dict[int, Tensor] = {}

    def measure(self, layer_idx: int, fresh: Tensor, stored: Tensor) -> None:
        """Compare a layer's values ``[Hkv, n, D]`` of the same tokens.

        A layer that is computed again holds fresh values in place of the stored ones, so its first measurement stays.
        """
        if layer_idx >= self._first and layer_idx not in self._by_layer:
            off, own = ((part.float().square().sum((0, 2))).sqrt() for part in (fresh - stored, stored))
            self._by_layer[layer_idx] = (off / own.clamp_min(torch.finfo(torch.float32).tiny)).mean()

    @property
    def deviation(self) -> float | None:
        """Mean over layers and tokens of the distance, as a share of the stored values' norm; None before any layer."""
        return float(torch.stack(list(self._by_layer.values())).mean()) if self._by_layer else None


def expected_divergence(uncovered: float, deviations: list[tuple[float, int]]) -> float:
    """Return ``u * d``: the question's attention to stored KV, times how wrong stored KV is in this prompt.

    Parameters
    ----------
    uncovered : float
        ``u``, of :func:`uncovered_attention`, in [0, 1].
    deviations : list of tuple of float and int
        ``d`` of each pass and the tokens it was measured on, not empty: ``d`` is their mean.
    """
    tokens = sum(count for _, count in deviations)
    return uncovered * sum(deviation * count for deviation, count in deviations) / tokens
