"""How a layer attends, as transformers asks its attention function to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fused_kv_kernels import RowPlan, eight_bit_row_attention, row_attention, token_scores
from fused_kv_llm.model.mask import CAUSAL, MaskRule

__all__ = ["AttentionRule"]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends, besides its queries, keys and values.

    Parameters
    ----------
    scale : float
        Multiplies the scores.
    mask : MaskRule
        Which keys a row sees.
    softcap : float or None
        Scores are bounded by this: ``softcap * tanh(score / softcap)`` (Gemma 2).
    sinks : Tensor or None
        ``[Hq]``: a score of each head that takes part in the softmax and has no value (gpt-oss).
    eight_bit : bool
        Whether outputs that are off by some hundredths suffice, where they take less time to compute.
    """

    scale: float
    mask: MaskRule = CAUSAL
    softcap: float | None = None
    sinks: Tensor | None = None
    eight_bit: bool = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, plan: RowPlan) -> Tensor:
        """Return the attention output ``[B, Hq, R, Dv]`` of a plan's rows: :func:`fused_kv_kernels.row_attention`."""
        attend = eight_bit_row_attention if self.eight_bit else row_attention
        return attend(q, k, v, plan, self.scale, softcap=self.softcap, sinks=self.sinks)

    def scores(self, q: Tensor, k: Tensor, positions: Tensor, first_keys: Tensor | None) -> Tensor:
        """Return the attention that keys receive, float32 ``[N]``: :func:`fused_kv_kernels.token_scores`."""
        return token_scores(q, k, positions, self.scale, first_keys=first_keys, softcap=self.softcap, sinks=self.sinks)
