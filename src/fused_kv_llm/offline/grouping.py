"""Dividing chunks into groups of similar ones, along who is whose neighbour."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from .batches import PendingChunk

__all__ = ["LEAST_TOGETHER", "group_tokens", "similar_groups"]

GROUP_CHUNKS = 32
"""Chunks of a group, if so many are linked."""

JOINING_CHUNKS = 4
"""Most chunks beyond these, which were left over."""

LEAST_TOGETHER = 4
"""Chunks of a prompt, if the corpus has so many: a smaller group is put behind similar chunks of other groups."""

_MOST_TOKENS = 8192
_MOST_BYTES = 2**29


def group_tokens(max_tokens: int, kv_bytes_per_token: int) -> int:
    """Return how many tokens a group may have, so that its KV fits in memory several times.

    Neighbours before a small group come on top, as many tokens again at most, or one chunk.

    Parameters
    ----------
    max_tokens : int
        Tokens that fit behind the header.
    kv_bytes_per_token : int
    """
    return min(max_tokens, _MOST_TOKENS, _MOST_BYTES // kv_bytes_per_token)


def similar_groups(chunks: Sequence[PendingChunk], most_tokens: int, separator_tokens: int) -> list[list[PendingChunk]]:
    """Divide chunks into groups of similar ones.

    A group grows from a chunk that has many links to others, by the chunk that has the most links to the group; a link
    is that one is the other's neighbour. A group that is full of tokens ends where few links are cut. Chunks that
    are left over join the group to which they have the most links.

    Parameters
    ----------
    chunks : sequence of PendingChunk
        With their neighbours.
    most_tokens : int
        Of a group, see :func:`group_tokens`. A longer chunk is a group of its own.
    separator_tokens : int
        Tokens that stand behind every chunk.

    Returns
    -------
    list of list of PendingChunk
        The same ones in whatever order the chunks come, each in the order in which it has grown: similar chunks stand
        together. A chunk without links to others of them is a group of its own: its neighbours are put before it.
    """
    # Keys are hashes, so their order is nobody's.
    known = {chunk.key: chunk for chunk in sorted(chunks, key=lambda chunk: chunk.key)}
    named = {key for chunk in chunks for key in chunk.neighbours}
    strangers, linked = list[PendingChunk](), list[PendingChunk]()
    for key, chunk in known.items():
        (strangers if key not in named and known.keys().isdisjoint(chunk.neighbours) else linked).append(chunk)
    groups = _Grouping(linked, most_tokens, separator_tokens).groups()
    return [[chunk] for chunk in strangers] + [[known[key] for key in group] for group in groups]


class _Grouping:
    """The chunks that are in no group yet, and who is linked with whom."""

    def __init__(self, chunks: Sequence[PendingChunk], most_tokens: int, separator_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._tokens = {chunk.key: len(chunk.token_ids) + separator_tokens for chunk in chunks}
        self._near = {chunk.key: chunk.neighbours for chunk in chunks}
        self._near_to = defaultdict[str, list[str]](list)
        for key, others in self._near.items():
            for other in others:
                self._near_to[other].append(key)
        # As a set that keeps its order.
        self._left = dict.fromkeys(self._near)

    def groups(self) -> list[list[str]]:
        """Return the keys of every group."""
        groups, small = list[list[str]](), list[list[str]]()
        # A chunk that many have as a neighbour is in the midst of a topic.
        for seed in sorted(self._near, key=lambda key: -len(self._near_to[key])):
            if seed in self._left:
                group = self._grown(seed)
                (groups if len(group) >= LEAST_TOGETHER else small).append(group)
        where = {key: number for number, group in enumerate(groups) for key in group}
        for group in small:
            alone = [key for key in group if not self._joined(key, groups, where)]
            if alone:
                groups.append(alone)
        return groups

    def _links(self, key: str) -> Iterator[str]:
        return chain(self._near[key], self._near_to[key])

    def _grown(self, seed: str) -> list[str]:
        group, tokens, links = list[str](), 0, Counter[str]()
        leading_out = list[float]()
        fitting = [seed]
        while fitting and len(group) < GROUP_CHUNKS:
            key = min(fitting, key=lambda one: (-links[one], one))
            group.append(key)
            tokens += self._tokens[key]
            del self._left[key]
            links.update(other for other in self._links(key) if other in self._left and self._fits_in(other))
            del links[key]
            leading_out.append(links.total() / len(group))
            fitting = [one for one in links if tokens + self._tokens[one] <= self._most_tokens]
        return self._cut(group, leading_out) if links and len(group) < GROUP_CHUNKS else group

    def _fits_in(self, key: str) -> bool:
        """Whether a chunk could be in a group with another one."""
        return self._tokens[key] < self._most_tokens

    def _cut(self, group: list[str], leading_out: list[float]) -> list[str]:
        """Give back what came last into a group that is full of tokens, up to half of it, where few links are cut.

        Few long chunks fill a group. It would end in the midst of a topic, whose other chunks then stand behind little
        that is like them. The links that are cut are divided by the size: inside a topic that is larger than a group,
        every size cuts many, and the group stays full.
        """
        least = max(LEAST_TOGETHER, (len(group) + 1) // 2)
        if len(group) <= least:
            return group
        count = min(range(len(group), least - 1, -1), key=lambda size: leading_out[size - 1])
        self._left.update(dict.fromkeys(group[count:]))
        return group[:count]

    def _joined(self, key: str, groups: list[list[str]], where: dict[str, int]) -> bool:
        """Put a chunk into the group to which it has the most links and which has room; return whether there is one."""
        links = Counter(where[other] for other in self._links(key) if other in where)
        for number, _ in sorted(links.items(), key=lambda found: (-found[1], found[0])):
            group = groups[number]
            tokens = sum(self._tokens[other] for other in group) + self._tokens[key]
            if len(group) < GROUP_CHUNKS + JOINING_CHUNKS and tokens <= self._most_tokens:
                group.append(key)
                where[key] = number
                return True
        return False
