"""Prompts of similar chunks, which show what chunks before a chunk change in its KV.

Every chunk of a group is put into several prompts behind an instruction. A large group is divided in two ways for that:
into halves of chunks that are most similar, and into every other chunk. So what stands before a chunk differs from
prompt to prompt. The chunks that stood late in the first prompts begin the second ones, which do not compute them: with
little before them they would show little, and what much changes in them is known. Where one prompt a chunk is asked
for, a large group makes two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .grouping import LEAST_TOGETHER
from .variant_builder import PromptChunks

__all__ = ["BEFORE_CHUNKS", "BETWEEN_CHUNKS", "PromptShape", "ShiftPrompt", "prompts_of_group"]

BEFORE_CHUNKS = "Use the following pieces of context to answer the question at the end.\n\n"
"""What prompts usually begin with: an instruction. Its words matter little, but that there is one shows in KV."""

BETWEEN_CHUNKS = "\n\n"
"""What prompts usually have between chunks: LangChain's and LlamaIndex' default."""

MOST_TOGETHER = 16
"""Chunks above which a group is divided."""

FEW_TOGETHER = 10
"""The same where not every chunk is put into two prompts."""

import os
_KNOWN = float(os.environ.get("KNOWN", 0.5))

_AGAIN = 3 / 8
"""Share of a run's chunks that stand behind the other run of the group, too."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What prompts of groups have beside chunks, how long they are, and how many of them show a chunk.

    Parameters
    ----------
    header : sequence of int
        Ids that every prompt begins with.
    instruction : sequence of int
        What stands behind the header, if there is room.
    separator : sequence of int
        What stands behind every chunk.
    max_tokens : int
        Most tokens behind the header.
    lead_tokens : int
        Most tokens of neighbours before a small group; one alone may be longer.
    times : int
        Prompts of each chunk: 1 and for some a second one, 2 or 4.
    """

    header: Sequence[int]
    instruction: Sequence[int]
    separator: Sequence[int]
    max_tokens: int
    lead_tokens: int
    times: int


class ShiftPrompt(NamedTuple):
    """A prompt that shows what the chunks before a chunk change in it.

    Parameters
    ----------
    prompt : PromptChunks
    known : int
        Chunks at its beginning that are not computed: the first, which stands behind an instruction only, and others
        that prompts before it show.
    """

    prompt: PromptChunks
    known: int = 1


def prompts_of_group(
    group: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], shape: PromptShape
) -> list[ShiftPrompt]:
    """Put a group of chunks into prompts.

    Parameters
    ----------
    group : sequence of PendingChunk
        Similar ones together; they fit behind the header.
    token_ids : mapping of str to tuple of int
        Stand-alone ids of the chunks and of their neighbours, by key.
    shape : PromptShape

    Returns
    -------
    list of ShiftPrompt
        A chunk behind its neighbours has one prompt; one that nothing fits before has none, which would show nothing.
        A group of few chunks has as many prompts as it has orders, and two even if one was asked for.
    """
    keys = [chunk.key for chunk in group]
    separator_tokens = len(shape.separator)
    room = shape.max_tokens - sum(len(chunk.token_ids) + separator_tokens for chunk in group)
    lead = _lead(group, token_ids, min(shape.lead_tokens, room), separator_tokens)
    if len(lead) + len(keys) < 2:
        # One that is longer than is wanted, or the chunk would never be preprocessed.
        lead = _lead(group, token_ids, room, separator_tokens)[:1]
    if len(lead) + len(keys) < 2:
        return []
    orders = _orders(keys, shape.times)
    return [
        ShiftPrompt(_prompt((*lead, *order), token_ids, shape), 1 if lead else known) for order, known in orders.items()
    ]


def _orders(keys: Sequence[str], times: int) -> dict[tuple[str, ...], int]:
    """Return the chunks of every prompt, and how many of its first are known."""
    if times == 1 and len(keys) > FEW_TOGETHER:
        return dict.fromkeys(map(tuple, _two_runs(keys)), 1)
    is_large = len(keys) > MOST_TOGETHER
    half = (len(keys) + 1) // 2
    near = [keys[:half], keys[half:]] if is_large else [keys]
    mixed = [keys[::2], keys[1::2]] if is_large else [[*keys[::2], *keys[1::2]]]
    late = {key for run in near for key in run[round((1 - _KNOWN) * len(run)) :]}
    orders = dict.fromkeys(map(tuple, near), 1)
    for run in mixed if is_large else near:
        known = [key for key in run[::-1] if key in late]
        order = (*known, *(key for key in run[::-1] if key not in late))
        orders.setdefault(order, max(1, len(known)))
    if times > 2:
        more = [*_backwards(near), *mixed] if is_large else [*_backwards(mixed), *mixed]
        orders |= {order: 1 for order in map(tuple, more) if order not in orders}
    return orders


def _backwards(orders: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [keys[::-1] for keys in orders]


def _two_runs(keys: Sequence[str]) -> list[Sequence[str]]:
    """Divide a group into two runs, each followed by the first chunks of the other.

    The first chunks of a run have little before them. Behind the other run they are seen once more, with much.
    """
    half = (len(keys) + 1) // 2
    runs = keys[:half], keys[half:]
    return [(*run, *other[: round(_AGAIN * len(other))]) for run, other in (runs, runs[::-1])]


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


def _prompt(keys: Sequence[str], token_ids: Mapping[str, tuple[int, ...]], shape: PromptShape) -> PromptChunks:
    room = shape.max_tokens - sum(len(token_ids[key]) + len(shape.separator) for key in keys)
    ids, segments = [*shape.header, *(shape.instruction if len(shape.instruction) <= room else ())], list[Segment]()
    for key in keys:
        start = len(ids)
        ids += token_ids[key]
        segments.append(Segment(start, len(ids), key))
        ids += shape.separator
    return PromptChunks(tuple(ids), tuple(segments))
