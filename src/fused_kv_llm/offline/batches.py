"""The chunks to prefill, in batches whose contexts fit in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PendingChunk", "batches", "walk_neighbours"]


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk that has to be prefilled.

    Parameters
    ----------
    key : str
    text : str
    token_ids : tuple of int
        Stand-alone ids.
    contexts : tuple of tuple of str
        What is to stand before it, one context after another: keys of similar chunks, the nearest one first.
    """

    key: str
    text: str
    token_ids: tuple[int, ...]
    contexts: tuple[tuple[str, ...], ...] = ()

    @property
    def neighbours(self) -> tuple[str, ...]:
        """The keys of the similar chunks of all contexts, the nearest one first."""
        return tuple(key for context in self.contexts for key in context)


def walk_neighbours(chunks: Sequence[PendingChunk]) -> list[PendingChunk]:
    """Order chunks along their neighbours, so that those which share a context come close together."""
    waiting = {chunk.key: chunk for chunk in chunks}
    ordered: list[PendingChunk] = []
    for first in chunks:
        stack = [first.key]
        while stack:
            chunk = waiting.pop(stack.pop(), None)
            if chunk is not None:
                ordered.append(chunk)
                stack.extend(chunk.neighbours)
    return ordered


def batches(
    chunks: Sequence[PendingChunk],
    max_tokens: Callable[[], int],
    num_tokens: Mapping[str, int],
    max_context_tokens: int,
) -> Iterator[list[PendingChunk]]:
    """Yield runs of chunks to be prefilled in one forward.

    Parameters
    ----------
    chunks : sequence of PendingChunk
    max_tokens : callable
        Says how many tokens a batch may have, for each; a longer chunk is a batch of its own.
    num_tokens : mapping of str to int
        Tokens of every context chunk, by key.
    max_context_tokens : int
        Tokens of the distinct context chunks of a batch, which are in memory at the same time.
    """
    batch: list[PendingChunk] = []
    tokens, most, context = 0, max_tokens(), set[str]()
    for chunk in chunks:
        together = context | set(chunk.neighbours)
        too_many = tokens + len(chunk.token_ids) > most
        if batch and (too_many or sum(num_tokens[key] for key in together) > max_context_tokens):
            yield batch
            batch, tokens, most, together = [], 0, max_tokens(), set(chunk.neighbours)
        batch.append(chunk)
        tokens, context = tokens + len(chunk.token_ids), together
    if batch:
        yield batch
