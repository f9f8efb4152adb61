"""Prompts of similar chunks, which show what chunks before a chunk change in its KV.

A group of similar chunks is put into two prompts in opposite orders, both behind an instruction: each other chunk of
the group stands before a chunk in one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .variant_builder import PromptChunks

__all__ = ["BEFORE_CHUNKS", "BETWEEN_CHUNKS", "group_tokens", "prompts_of_group", "similar_groups"]

BEFORE_CHUNKS = "Use the following pieces of context to answer the question at the end.\n\n"
"""What prompts usually begin with: an instruction. Its words matter little, but that there is one shows in KV."""

BETWEEN_CHUNKS = "\n\n"
"""What prompts usually have between chunks: LangChain's and LlamaIndex' default."""

GROUP_CHUNKS = 20
"""Most chunks of a group."""

LEAST_TOGETHER = 4
"""Chunks of a prompt, if the corpus has so many: a smaller group is put behind similar chunks of other groups."""


_MOST_TOKENS = 4096
_MOST_BYTES = 2**30


def group_tokens(max_tokens: int, kv_bytes_per_token: int) -> int:
    """Return how many tokens a group may have, so that its KV fits in memory several times.

    Parameters
    ----------
    max_tokens : int
        Tokens that fit behind the header.
    kv_bytes_per_token : int
    """
    return min(max_tokens, _MOST_TOKENS, _MOST_BYTES // kv_bytes_per_token)


def similar_groups(
    chunks: Sequence[PendingChunk], most_tokens: int, separator_tokens: int
) -> Iterator[list[PendingChunk]]:
    """Divide chunks into groups of similar ones.

    Parameters
    ----------
    chunks : sequence of PendingChunk
        With their neighbours.
    most_tokens : int
        Of a group, see :func:`group_tokens`. A longer chunk is a group of its own.
    separator_tokens : int
        Tokens that stand behind every chunk.

    Yields
    ------
    list of PendingChunk
        A chunk, its neighbours, theirs and so on, as far as no other group has them; then others. A chunk of whose
        neighbours none is among the chunks is a group of its own: its neighbours are put before it.
    """
    # Keys are hashes, so their order is nobody's.
    left = {chunk.key: chunk for chunk in sorted(chunks, key=lambda chunk: chunk.key)}
    strangers = [chunk for chunk in left.values() if left.keys().isdisjoint(chunk.neighbours)]
    for chunk in strangers:
        yield [left.pop(chunk.key)]
    while left:
        group, tokens = list[PendingChunk](), 0
        waiting = deque[str]()
        while left and len(group) < GROUP_CHUNKS:
            key = waiting.popleft() if waiting else next(iter(left))
            if key not in left:
                continue
            tokens += len(left[key].token_ids) + separator_tokens
            if group and tokens > most_tokens:
                break
            group.append(left.pop(key))
            waiting.extend(group[-1].neighbours)
        yield sorted(group, key=lambda chunk: chunk.key)


def prompts_of_group(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], header: Sequence[int],
    instruction: Sequence[int], separator: Sequence[int], max_tokens: int, lead_tokens: int,
) -> list[PromptChunks]:  # fmt: skip
    """Put a group of chunks into prompts, forwards and backwards.

    Parameters
    ----------
    group : sequence of PendingChunk
    token_ids : mapping of str to tuple of int
        Stand-alone ids of the chunks and of their neighbours, by key.
    header : sequence of int
    instruction : sequence of int
        What stands behind the header, if there is room.
    separator : sequence of int
        What stands behind every chunk.
    max_tokens : int
        Most tokens behind the header.
    lead_tokens : int
        Most tokens of neighbours before a small group; one alone may be longer.

    Returns
    -------
    list of PromptChunks
        The group's chunks are the last ones of each. None of a chunk that nothing fits before: they would show nothing.
    """
    keys = [chunk.key for chunk in group]
    room = max_tokens - sum(len(chunk.token_ids) + len(separator) for chunk in group)
    lead = _lead(group, token_ids, min(lead_tokens, room), len(separator))
    if len(lead) + len(keys) < 2:
        # One that is longer than is wanted, or the chunk would never be preprocessed.
        lead = _lead(group, token_ids, room, len(separator))[:1]
    if len(lead) + len(keys) < 2:
        return []
    room -= sum(len(token_ids[key]) + len(separator) for key in lead)
    begin = [*header, *(instruction if len(instruction) <= room else ())]
    orders = dict.fromkeys((tuple(keys), tuple(reversed(keys))))
    return [_prompt((*lead, *order), token_ids, begin, separator) for order in orders]


def _lead(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], room: int, separator_tokens: int
) -> list[str]:
    """Return neighbours that stand before a small group, as many as are wanted and fit."""
    lead, inside = list[str](), {chunk.key for chunk in group}
    for key in dict.fromkeys(key for chunk in group for key in chunk.neighbours if key not in inside):
        tokens = len(token_ids[key]) + separator_tokens
        if len(lead) + len(group) < LEAST_TOGETHER and tokens <= room:
            lead.append(key)
            room -= tokens
    return lead


def _prompt(
    keys: Sequence[str], token_ids: Mapping[str, tuple[int, ...]], begin: Sequence[int], separator: Sequence[int]
) -> PromptChunks:
    ids, segments = list(begin), list[Segment]()
    for key in keys:
        start = len(ids)
        ids += token_ids[key]
        segments.append(Segment(start, len(ids), key))
        ids += separator
    return PromptChunks(tuple(ids), tuple(segments))
