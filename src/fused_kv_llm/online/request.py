"""One request: its tokens, which spans reuse stored KV, and which rows must be computed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fused_kv_llm.context_shift import USUAL_WEIGHT
from fused_kv_llm.kv import PlacedChunk, PrefixMatch, PrefixRun
from fused_kv_llm.prompt import Segment
from fused_kv_llm.selectors import View, sidecar_names
from fused_kv_llm.store import StoredSidecar
from fused_kv_llm.verdicts import JudgedPrompt

from .load_ahead import LoadAhead

__all__ = ["Request"]

_SHORT_TAIL_TOKENS = 16
_TEXT_SEGMENT_TOKENS = 8
_KNOWN = -2


class Request:
    """A planned prompt; it owns the open chunks, and closes them as a context manager.

    Parameters
    ----------
    ids : list of int
        The prompt's token ids.
    prefix_tokens : int
        Leading tokens whose exact KV is in memory.
    chunks : list of PlacedChunk
        Open chunks at their places, ascending, none inside the prefix.
    text : str
        The rendered prompt.
    offsets : numpy.ndarray or None
        ``[tokens, 2]`` half-open character spans of the tokens in `text`.

    Attributes
    ----------
    loading : LoadAhead or None
        How far its layers are on their way into memory; None if they are read when they are needed.
    shifts : dict of str to StoredSidecar or None
        By chunk key, context shifts that were opened ahead, or None for a chunk without one. Others are opened later.
    header_tokens : int
        Leading tokens that every prompt has, after which chunks were prefilled; part of the prefix.
    seen_tokens : int
        Leading tokens that the probe sees: the prefix if it contains fused KV, and otherwise the header only. Which
        tokens are recomputed does not depend on whether somebody has asked something that begins alike, then.
    match : PrefixMatch or None
        The prefix's KV, if it is more than the header's.
    since : int or None
        See :class:`.KeptPrompt`.
    num_covered : int
        Chunks that the prefix contains.
    on_closed : callable
        Called when the chunks are closed.
    segments : tuple of Segment
        All stored chunks that were found in the prompt, whether their KV could be opened or not.
    judged : JudgedPrompt
        What becomes of them.
    """

    def __init__(
        self,
        ids: list[int],
        prefix_tokens: int,
        chunks: list[PlacedChunk],
        text: str = "",
        offsets: NDArray[np.int64] | None = None,
    ) -> None:
        self.ids = ids
        self.text = text
        self.offsets = offsets
        # The last token is always computed: its logits are what the request is for.
        self.prefix_tokens = self.header_tokens = self.seen_tokens = min(prefix_tokens, len(ids) - 1)
        self.chunks = chunks
        self.kind = torch.full((len(ids),), -1, dtype=torch.int64)
        self.kind[: self.prefix_tokens] = _KNOWN
        for index, chunk in enumerate(chunks):
            self.kind[chunk.segment.start : chunk.segment.stop] = index
        self.kind[-1] = -1
        self.loading: LoadAhead | None = None
        self.shifts: dict[str, StoredSidecar | None] = {}
        self.match: PrefixMatch | None = None
        self.since: int | None = None
        self.num_covered = 0
        self.on_closed: Callable[[], object] = lambda: None
        self.segments: tuple[Segment, ...] = ()
        self.judged = JudgedPrompt(text)

    @property
    def known_runs(self) -> list[PrefixRun]:
        """How the prefix's tokens came by their KV."""
        return [PrefixRun(self.prefix_tokens)] if self.match is None else self.match.runs

    @property
    def has_first_chunk(self) -> bool:
        """Whether the first of `chunks` is the prompt's first: none before it was found, or is in the prefix.

        A prefix with fused KV has a chunk, though the store may have lost it since.
        """
        if not (self.segments and self.chunks):
            return True
        first = self.chunks[0].segment
        # What is left of a chunk whose beginning the prefix has is that chunk still.
        is_cut = first.start == self.prefix_tokens and first.chunk_start > 0
        behind_fused = self.match is not None and not self.match.is_exact and not is_cut
        return first.stop == self.segments[0].stop and not behind_fused

    def begin_after(self, match: PrefixMatch) -> None:
        """Use the KV of a longer prefix than the header's; it contains none of the request's chunks."""
        self.match = match
        self.prefix_tokens = min(match.num_tokens, len(self.ids) - 1)
        self.kind[self.header_tokens : self.prefix_tokens] = _KNOWN
        if not match.is_exact:
            self.seen_tokens = self.prefix_tokens

    def _begin_after_header(self) -> None:
        """Compute what stands behind the header, though its KV is known."""
        self.kind[self.header_tokens : self.prefix_tokens] = -1
        self.prefix_tokens = self.header_tokens
        if self.match is not None:
            self.match.release()
        self.match = None

    def close(self) -> None:
        """Close the chunks and context shifts, once nobody reads them any more; closing twice is harmless.

        What the prefix tree has of the prompt may make room then.
        """
        if self.match is not None:
            self.match.release()
        if self.loading is None:
            self._close_files()
        else:
            self.loading.end(self._close_files)

    def _close_files(self) -> None:
        for chunk in self.chunks:
            chunk.stored.close()
        for shift in self.shifts.values():
            if shift is not None:
                shift.close()
        self.on_closed()

    def __enter__(self) -> Self:
        """Return the request."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the chunks."""
        self.close()

    def anchor_names(self, chunk: PlacedChunk, view: View) -> tuple[str, ...]:
        """Return the names of the sidecars that a chunk's anchors may be in: that nearest to its place comes first."""
        # A chunk that was stored without neighbours has none with a shift.
        is_early = chunk.shift_weight(self.header_tokens) < USUAL_WEIGHT / 2
        return sidecar_names(view)[-1 if is_early else 0 :]

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

        The question is the fresh text after the last chunk. Where that is only a template's footer, the question
        probably stands before the chunks. Then the longer fresh texts before them are computed too, so that the footer
        attends to them; also those whose KV is known, if the probe does not see it.
        """
        chunk = self.chunk_positions
        last_chunk = int(chunk[-1]) if chunk.shape[0] else -1
        fresh = self.fresh_positions
        tail = fresh[fresh > last_chunk]
        if tail.shape[0] >= _SHORT_TAIL_TOKENS:
            return tail, int(tail.shape[0])
        if self.seen_tokens < self.prefix_tokens:
            self._begin_after_header()
            fresh = self.fresh_positions
        before = fresh[fresh < last_chunk]
        runs = torch.tensor_split(before, ((before.diff() != 1).nonzero()[:, 0] + 1).tolist())
        texts = [run for run in runs if run.shape[0] >= _TEXT_SEGMENT_TOKENS]
        return torch.cat((*texts, tail)), int(tail.shape[0])
