"""Prompts of a corpus's own chunks, on which its shift map is fitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .variant_builder import PromptChunks

__all__ = ["LEAST_CHUNKS", "prompts_of_chunks"]

LEAST_CHUNKS = 64
"""Chunks without which a fit takes longer than it is worth."""

_CHUNKS_PER_PROMPT = 10
_CHUNKS_FOR_A_PROMPT = 25
_MOST_PROMPTS = 16


def prompts_of_chunks(
    chunks: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], header: Sequence[int],
    separator: Sequence[int], max_tokens: int,
) -> list[PromptChunks]:  # fmt: skip
    """Put chunks and their neighbours together, from all over a corpus.

    Parameters
    ----------
    chunks : sequence of PendingChunk
        Those whose shift is known to be computed.
    token_ids : mapping of str to tuple of int
        Stand-alone ids by key.
    header : sequence of int
    separator : sequence of int
        What stands between chunks.
    max_tokens : int
        Most tokens behind the header.

    Returns
    -------
    list of PromptChunks
        One for 25 chunks, at most 16, each of other chunks. None of fewer than 64 chunks, nor where fewer than two
        prompts have a chunk before another: they teach nothing.
    """
    if len(chunks) < LEAST_CHUNKS:
        return []
    # Keys are hashes, so their order is nobody's.
    left = {chunk.key: chunk for chunk in sorted(chunks, key=lambda chunk: chunk.key)}
    groups = (_take_group(left) for _ in range(min(_MOST_PROMPTS, len(chunks) // _CHUNKS_FOR_A_PROMPT)))
    prompts = [_prompt(group, token_ids, header, separator, max_tokens) for group in groups]
    teaching = [prompt for prompt in prompts if len(prompt.segments) > 1]
    return teaching if len(teaching) > 1 else []


def _take_group(left: dict[str, PendingChunk]) -> list[str]:
    """Take a chunk away, its neighbours, theirs and so on, and others where those are not among the chunks left."""
    group, waiting = list[str](), deque[str]()
    while len(group) < _CHUNKS_PER_PROMPT and left:
        key = waiting.popleft() if waiting else next(iter(left))
        if key in left:
            group.append(key)
            waiting.extend(left.pop(key).neighbours)
    return sorted(group)


def _prompt(
    keys: Sequence[str], token_ids: Mapping[str, tuple[int, ...]], header: Sequence[int], separator: Sequence[int],
    max_tokens: int,
) -> PromptChunks:  # fmt: skip
    ids, segments = list(header), list[Segment]()
    for key in keys:
        start = len(ids)
        if start - len(header) + len(token_ids[key]) > max_tokens:
            continue
        ids += token_ids[key]
        segments.append(Segment(start, len(ids), key))
        ids += separator
    return PromptChunks(tuple(ids), tuple(segments))
