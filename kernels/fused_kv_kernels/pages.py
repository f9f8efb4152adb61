"""Page tables: which pages hold a request's KV, and the position of each of their slots in its prompt.

FusionRAG section 4.3 and figure 12: requests share the pages of a chunk, whose keys stay at the positions at which they
were prefilled. A request's recomputed tokens lie in pages of its own and replace the shared entries at the same
positions. A slot that a request must not see has the position -1; kernels need no other mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .rotate import rotation_table

__all__ = ["HIDDEN", "PageTable", "SharedPages"]

HIDDEN = -1


@dataclass(frozen=True, slots=True)
class SharedPages:
    """A chunk as one request sees it.

    Parameters
    ----------
    pages : sequence of int
        Pages that hold its tokens, in order.
    num_tokens : int
        Tokens in them; the last page may have free slots.
    start : int
        Position of its first token in the request.
    delta : int
        `start` less the position that its first key was rotated to when it was prefilled.
    """

    pages: Sequence[int]
    num_tokens: int
    start: int
    delta: int


class PageTable:
    """The pages of a batch of requests.

    Parameters
    ----------
    shared : sequence of sequence of SharedPages
        The chunks of every request.
    own_pages : sequence of sequence of int
        Every request's exclusive pages, with room for all that it will compute.
    page_size : int
        Slots in a page: a power of two, at least 16.
    inv_freq : Tensor
        ``[rotary / 2]``, the model's rotary frequencies.
    device : torch.device

    Attributes
    ----------
    pages : Tensor
        int64 ``[B, P]``; the shared ones first, padded with page 0.
    positions : Tensor
        int64 ``[B, P * page_size]``: where each slot stands, -1 where the request does not see it.
    cos, sin : Tensor
        float32 ``[B, P, rotary / 2]``: by what the keys of each page are rotated.
    largest_page : int
        Of all that are named; -1 if there are none.

    Raises
    ------
    ValueError
        If the page size is none, a chunk has more tokens than its pages have slots, or chunks of a request overlap.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[SharedPages]],
        own_pages: Sequence[Sequence[int]],
        page_size: int,
        inv_freq: Tensor,
        device: torch.device | str = "cpu",
    ) -> None:
        if page_size < 16 or page_size & (page_size - 1):
            msg = f"page_size={page_size} must be a power of two, at least 16"
            raise ValueError(msg)
        self.page_size = page_size
        ids, deltas, positions = [], [], []
        self._free: list[list[int]] = []
        for chunks, own in zip(shared, own_pages, strict=True):
            _check_spans(chunks)
            pages, moves, stands = list[int](), list[int](), list[int]()
            for chunk in chunks:
                slots = len(chunk.pages) * page_size
                if chunk.num_tokens > slots:
                    msg = f"a chunk of {chunk.num_tokens} tokens does not fit into {len(chunk.pages)} pages"
                    raise ValueError(msg)
                pages += chunk.pages
                moves += [chunk.delta] * len(chunk.pages)
                stands += range(chunk.start, chunk.start + chunk.num_tokens)
                stands += [HIDDEN] * (slots - chunk.num_tokens)
            self._free.append(list(range(len(stands), len(stands) + len(own) * page_size)))
            ids.append([*pages, *own])
            deltas.append([*moves, *([0] * len(own))])
            positions.append([*stands, *([HIDDEN] * (len(own) * page_size))])
        most = max((len(row) for row in ids), default=0)
        self.largest_page = max((page for row in ids for page in row), default=-1)
        self.pages = _padded(ids, most, 0).to(device)
        self.positions = _padded(positions, most * page_size, HIDDEN).to(device)
        turn = rotation_table(_padded(deltas, most, 0).flatten(), inv_freq.cpu()).to(device)
        self.cos, self.sin = (part.view(len(ids), most, -1) for part in (turn.cos, turn.sin))

    def take(self, request: int, positions: Sequence[int]) -> Tensor:
        """Give slots of a request's own pages to positions it computes; older entries at them are hidden.

        Parameters
        ----------
        request : int
            Its row in the batch.
        positions : sequence of int

        Returns
        -------
        Tensor
            int64 ``[len(positions), 2]``: page and slot, where the keys (rotated to these positions) and values go.

        Raises
        ------
        ValueError
            If its own pages have no room for them, one is named twice, or is negative.
        """
        if len(set(positions)) < len(positions) or any(position < 0 for position in positions):
            msg = f"positions {list(positions)} must each be named once, and none be negative"
            raise ValueError(msg)
        free = self._free[request]
        if len(positions) > len(free):
            msg = f"request {request} has {len(free)} free slots for {len(positions)} tokens: give it more pages"
            raise ValueError(msg)
        taken, self._free[request] = free[: len(positions)], free[len(positions) :]
        device = self.positions.device
        slots, stands = (torch.tensor(list(x), dtype=torch.int64, device=device) for x in (taken, positions))
        row = self.positions[request]
        row[torch.isin(row, stands)] = HIDDEN
        row[slots] = stands
        return torch.stack((self.pages[request, slots // self.page_size], slots % self.page_size), dim=1)


def _check_spans(chunks: Sequence[SharedPages]) -> None:
    """Refuse chunks with a position that is negative, which would hide a token, or two of them have."""
    ends_at = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if chunk.start < 0:
            msg = f"a chunk cannot begin at start={chunk.start}"
            raise ValueError(msg)
        if chunk.start < ends_at and chunk.num_tokens:
            msg = f"chunks overlap: one begins at {chunk.start}, before another's end at {ends_at}"
            raise ValueError(msg)
        ends_at = max(ends_at, chunk.start + chunk.num_tokens)


def _padded(rows: Sequence[Sequence[int]], length: int, filler: int) -> Tensor:
    return torch.tensor([[*row, *([filler] * (length - len(row)))] for row in rows], dtype=torch.int64)
