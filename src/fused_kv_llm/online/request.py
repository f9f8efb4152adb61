"""One request: its tokens, which spans reuse stored KV, and which rows must be computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fused_kv_llm.prompt import Segment
from fused_kv_llm.store import StoredKV

__all__ = ["Placement", "Request"]

_SHORT_TAIL_TOKENS = 16
_TEXT_SEGMENT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """A chunk segment of the prompt and the stored KV that fills it.

    Parameters
    ----------
    segment : Segment
        Prompt positions ``[start, stop)`` and the offset of the first token in the chunk.
    stored : StoredKV
        The open chunk.
    """

    segment: Segment
    stored: StoredKV

    @property
    def num_tokens(self) -> int:
        """Reusable tokens."""
        return self.segment.stop - self.segment.start

    @property
    def delta(self) -> int:
        """Positions by which the chunk's keys have to move."""
        return self.segment.start - (self.stored.position + self.segment.chunk_start)


class Request:
    """A planned prompt.

    Parameters
    ----------
    ids : list of int
        The prompt's token ids.
    prefix_tokens : int
        Leading tokens whose exact KV is at hand.
    placements : list of Placement
        Chunk segments with stored KV, ascending, none inside the prefix.
    text : str
        The rendered prompt.
    offsets : numpy.ndarray or None
        ``[tokens, 2]`` half-open character spans of the tokens in `text`.
    """

    def __init__(
        self,
        ids: list[int],
        prefix_tokens: int,
        placements: list[Placement],
        text: str = "",
        offsets: NDArray[np.int64] | None = None,
    ) -> None:
        self.ids = ids
        self.text = text
        self.offsets = offsets
        # The last token is always computed: its logits are what the request is for.
        self.prefix_tokens = min(prefix_tokens, len(ids) - 1)
        self.placements = placements
        self.kind = torch.full((len(ids),), -1, dtype=torch.int64)
        self.kind[: self.prefix_tokens] = -2
        for index, placement in enumerate(placements):
            self.kind[placement.segment.start : placement.segment.stop] = index
        self.kind[-1] = -1

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids)

    @property
    def chunk_positions(self) -> Tensor:
        """int64 positions whose stored KV could be reused, ascending."""
        return (self.kind >= 0).nonzero()[:, 0]

    @property
    def fresh_positions(self) -> Tensor:
        """int64 positions without any KV, ascending; never empty."""
        return (self.kind == -1).nonzero()[:, 0]

    def rows(self, selected: Tensor) -> Tensor:
        """Return the positions to compute: the fresh ones and the `selected` chunk tokens, ascending."""
        return torch.cat((self.fresh_positions, selected)).sort().values

    def question_rows(self) -> tuple[Tensor, int]:
        """Return the positions the probe computes, and how many of the last ones are the question.

        The question is the fresh text after the last chunk. Where that is only a template's footer, the
        question probably stands before the chunks: then the other longer fresh texts are computed before it,
        so that it attends to them.
        """
        chunk = self.chunk_positions
        last_chunk = int(chunk[-1]) if chunk.shape[0] else -1
        fresh = self.fresh_positions
        tail = fresh[fresh > last_chunk]
        if tail.shape[0] >= _SHORT_TAIL_TOKENS:
            return tail, int(tail.shape[0])
        before = fresh[fresh < last_chunk]
        runs = torch.tensor_split(before, ((before.diff() != 1).nonzero()[:, 0] + 1).tolist())
        texts = [run for run in runs if run.shape[0] >= _TEXT_SEGMENT_TOKENS]
        return torch.cat((*texts, tail)), int(tail.shape[0])
