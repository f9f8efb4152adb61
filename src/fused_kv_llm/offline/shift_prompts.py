"""Prompts of similar chunks, which show what chunks before a chunk change in its KV.

Every chunk of a group is put into two prompts behind an instruction. A large group is divided twice for that: into
halves of chunks that are most similar, and into every other chunk, backwards. So a chunk stands behind others in its
second prompt than in its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .grouping import LEAST_TOGETHER
from .variant_builder import PromptChunks

__all__ = ["BEFORE_CHUNKS", "BETWEEN_CHUNKS", "prompts_of_group"]

BEFORE_CHUNKS = "Use the following pieces of context to answer the question at the end.\n\n"
"""What prompts usually begin with: an instruction. Its words matter little, but that there is one shows in KV."""

BETWEEN_CHUNKS = "\n\n"
"""What prompts usually have between chunks: LangChain's and LlamaIndex' default."""


MOST_TOGETHER = 16
"""Chunks above which a group is divided."""


def prompts_of_group(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], header: Sequence[int],
    instruction: Sequence[int], separator: Sequence[int], max_tokens: int, lead_tokens: int,
) -> list[PromptChunks]:  # fmt: skip
    """Put a group of chunks into prompts, each chunk into two.

    Parameters
    ----------
    group : sequence of PendingChunk
        Similar ones together; they fit behind the header.
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
        A chunk behind its neighbours has one prompt; one that nothing fits before has none, which would show nothing.
    """
    keys = [chunk.key for chunk in group]
    room = max_tokens - sum(len(chunk.token_ids) + len(separator) for chunk in group)
    lead = _lead(group, token_ids, min(lead_tokens, room), len(separator))
    if len(lead) + len(keys) < 2:
        # One that is longer than is wanted, or the chunk would never be preprocessed.
        lead = _lead(group, token_ids, room, len(separator))[:1]
    if len(lead) + len(keys) < 2:
        return []
    words = header, instruction, separator
    return [_prompt((*lead, *order), token_ids, words, max_tokens) for order in _orders(keys)]


def _orders(keys: Sequence[str]) -> list[Sequence[str]]:
    """Return the chunks of every prompt."""
    if len(keys) > MOST_TOGETHER:
        half = (len(keys) + 1) // 2
        return [keys[:half], keys[half:], keys[::2][::-1], keys[1::2][::-1]]
    return [keys, keys[::-1]] if len(keys) > 1 else [keys]


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
    keys: Sequence[str], token_ids: Mapping[str, tuple[int, ...]], words: tuple[Sequence[int], ...], max_tokens: int
) -> PromptChunks:
    header, instruction, separator = words
    room = max_tokens - sum(len(token_ids[key]) + len(separator) for key in keys)
    ids, segments = [*header, *(instruction if len(instruction) <= room else ())], list[Segment]()
    for key in keys:
        start = len(ids)
        ids += token_ids[key]
        segments.append(Segment(start, len(ids), key))
        ids += separator
    return PromptChunks(tuple(ids), tuple(segments))
