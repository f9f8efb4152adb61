"""Prompts of similar chunks, which show what chunks before a chunk change in its KV.

Every chunk of a group is put into several prompts behind an instruction. A large group is divided in two ways for that:
into halves of chunks that are most similar, and into every other chunk. A prompt runs forwards or backwards. So what
stands before a chunk differs from prompt to prompt. Where one prompt a chunk is asked for, there are two as well, but
the second ones compute only the chunks that have little before them in the first ones, behind the others. A group of
few chunks stands behind neighbours and is computed twice all the same.
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
        Prompts of each chunk: 2 or 4. 1 means two, of which the second computes half of the chunks.
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
    return [ShiftPrompt(_prompt((*lead, *order), token_ids, shape), known) for order, known in orders.items()]


def _orders(keys: Sequence[str], times: int) -> dict[tuple[str, ...], int]:
    """Return the chunks of every prompt, and how many of its first are known."""
    if len(keys) > MOST_TOGETHER:
        half = (len(keys) + 1) // 2
        near, mixed = [keys[:half], keys[half:]], [keys[::2], keys[1::2]]
        orders = [*near, *_backwards(mixed), *_backwards(near), *mixed]
    else:
        near, mixed = [keys], [[*keys[::2], *keys[1::2]]]
        orders = [keys, *_backwards([keys]), *_backwards(mixed), *mixed]
    # They show each chunk four times; the first half of them shows it twice, behind others each time.
    wanted = list(dict.fromkeys(map(tuple, orders[: len(orders) * max(times, 2) // 4])))
    return _half_again(wanted[: len(near)], wanted[len(near) :]) if times == 1 else dict.fromkeys(wanted, 1)


def _half_again(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Have the second prompts begin with the chunks that stand late in the first ones, and take these as known.

    At the beginning of a prompt a chunk has little before it, which shows little.
    """
    late = {key for keys in first for key in keys[(len(keys) + 1) // 2 :]}
    made = dict.fromkeys(first, 1)
    for keys in second:
        known = [key for key in keys if key in late]
        made[(*known, *(key for key in keys if key not in late))] = max(1, len(known))
    return made


def _backwards(orders: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [keys[::-1] for keys in orders]


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
