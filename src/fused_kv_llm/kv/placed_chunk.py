"""A chunk at its place in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fused_kv_llm.context_shift import place_weight
from fused_kv_llm.prompt import Segment
from fused_kv_llm.store import StoredKV

__all__ = ["PlacedChunk", "VariantUse"]


@dataclass(frozen=True, slots=True)
class VariantUse:
    """A variant that stands in for a chunk's plain KV.

    Parameters
    ----------
    name : str
        The variant's.
    overhead : float
        Its cache fix overhead in this prompt.
    token_inter : Tensor
        float32 ``[T]``, see :class:`.VariantRecord`.
    """

    name: str
    overhead: float
    token_inter: Tensor


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk segment of the prompt and the stored KV that fills it.

    Parameters
    ----------
    segment : Segment
        Prompt positions ``[start, stop)`` and the offset of the first token in the chunk.
    stored : StoredKV
        The open chunk, or one of its variants.
    variant : VariantUse or None
        Which variant it is, if it is one.
    """

    segment: Segment
    stored: StoredKV
    variant: VariantUse | None = None

    @property
    def num_tokens(self) -> int:
        """Reusable tokens."""
        return self.segment.stop - self.segment.start

    def shift_weight(self, header_tokens: int) -> float:
        """Return how much of its context shift is added here: nothing right behind the header."""
        # A variant has been computed behind other chunks already.
        if self.variant is not None:
            return 0.0
        return place_weight(self.segment.start - header_tokens, self.stored.num_tokens)

    @property
    def inside(self) -> slice:
        """Which of the chunk's own tokens they are."""
        return slice(self.segment.chunk_start, self.segment.chunk_start + self.num_tokens)

    @property
    def delta(self) -> int:
        """Positions by which the chunk's keys have to move."""
        return self.segment.start - (self.stored.position + self.segment.chunk_start)
