"""Prompts of similar chunks, which show what a prompt changes in the KV of a chunk.

A group of similar chunks is put into one prompt behind an instruction. The first one stands there as it is stored, with
its plain KV. The first two have too little before them there: they are computed once more, behind all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .grouping import LEAST_TOGETHER
from .variant_builder import PromptChunks

__all__ = ["BEFORE_CHUNKS", "BETWEEN_CHUNKS", "prompt_of_group"]

BEFORE_CHUNKS = "Use the following pieces of context to answer the question at the end.\n\n"
"""What prompts usually begin with: an instruction. Its words matter little, but that there is one shows in KV."""

BETWEEN_CHUNKS = "\n\n"
"""What prompts usually have between chunks: LangChain's and LlamaIndex' default."""

AGAIN_CHUNKS = 2
"""First chunks of a prompt, which have too little before them: they are computed behind the others."""


def prompt_of_group(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], header: Sequence[int],
    instruction: Sequence[int], separator: Sequence[int], max_tokens: int, lead_tokens: int,
) -> PromptChunks | None:  # fmt: skip
    """Put a group of chunks into a prompt.

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
        Most tokens of neighbours before a small group; a single one may be longer.

    Returns
    -------
    PromptChunks or None
        The group's chunks are the last ones. None for a chunk that nothing fits before: it would show nothing.
    """
    room = max_tokens - sum(len(chunk.token_ids) + len(separator) for chunk in group)
    lead = _lead(group, token_ids, (lead_tokens, room), len(separator))
    keys = [*lead, *(chunk.key for chunk in group)]
    if len(keys) < 2:
        return None
    room -= sum(len(token_ids[key]) + len(separator) for key in lead)
    ids, segments = [*header, *(instruction if len(instruction) <= room else ())], list[Segment]()
    for key in keys:
        start = len(ids)
        ids += token_ids[key]
        segments.append(Segment(start, len(ids), key))
        ids += separator
    return PromptChunks(tuple(ids), tuple(segments))


def _lead(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], room: tuple[int, int],
    separator_tokens: int,
) -> list[str]:  # fmt: skip
    """Return neighbours that stand before a small group, as many as are wanted and fit; else one that fits somehow."""
    inside = {chunk.key for chunk in group}
    near = dict.fromkeys(key for chunk in group for key in chunk.neighbours if key not in inside)
    tokens = {key: len(token_ids[key]) + separator_tokens for key in near}
    lead, left = list[str](), min(room)
    for key in near:
        if len(lead) + len(group) < LEAST_TOGETHER and tokens[key] <= left:
            lead.append(key)
            left -= tokens[key]
    if not lead and len(group) == 1:
        # It stands there as it is stored, so that a long one costs little.
        lead = [key for key in near if tokens[key] <= room[1]][:1]
    return lead
