"""Prompts of a corpus's own chunks, on which its shift map is fitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .variant_builder import PromptChunks

__all__ = ["LEAST_CHUNKS", "prompts_of_chunks"]

LEAST_CHUNKS = 64
"""Chunks without which a fit would cost more than a third of what it is for."""

_CHUNKS_PER_PROMPT = 10
_CHUNKS_FOR_A_PROMPT = 25
_LEAST_PROMPTS, _MOST_PROMPTS = 2, 16


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
        One for 25 chunks, at most 16, each of other chunks; none of fewer than 64 chunks.
    """
    if len(chunks) < LEAST_CHUNKS:
        return []
    known = {chunk.key: chunk for chunk in chunks}
    count = max(_LEAST_PROMPTS, min(_MOST_PROMPTS, len(chunks) // _CHUNKS_FOR_A_PROMPT))
    prompts = []
    for _ in range(count):
        group = _group(known, min(known))
        known = {key: chunk for key, chunk in known.items() if key not in group}
        prompts.append(_prompt(group, token_ids, header, separator, max_tokens))
    return prompts


def _group(known: Mapping[str, PendingChunk], seed: str) -> list[str]:
    """Return a chunk, its neighbours, theirs and so on, and others where those are not among the known.

    Keys are hashes, so their order is nobody's.
    """
    keys = sorted(known)
    after = keys.index(seed)
    others = deque(keys[after:] + keys[:after])
    group, waiting = dict.fromkeys([seed]), deque[str]()
    while len(group) < _CHUNKS_PER_PROMPT and (waiting or others):
        key = waiting.popleft() if waiting else others.popleft()
        group.setdefault(key)
        for other in known[key].neighbours:
            if other in known and other not in group and len(group) < _CHUNKS_PER_PROMPT:
                group[other] = None
                waiting.append(other)
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
