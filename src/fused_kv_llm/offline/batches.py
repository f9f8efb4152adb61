"""Batches of chunks of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["PendingChunk", "length_sorted_batches"]


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk that has to be prefilled.

    Parameters
    ----------
    key : str
    text : str
    token_ids : tuple of int
        Stand-alone ids.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]


def length_sorted_batches(chunks: Sequence[PendingChunk], max_tokens: int) -> Iterator[list[PendingChunk]]:
    """Yield batches of at most `max_tokens` padded tokens, longest chunks first.

    Longest first, so that a batch that does not fit in memory fails at the start and the estimate of the
    time left errs on the safe side. A chunk longer than `max_tokens` is a batch of its own.
    """
    batch: list[PendingChunk] = []
    for chunk in sorted(chunks, key=lambda c: len(c.token_ids), reverse=True):
        if batch and len(batch[0].token_ids) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
