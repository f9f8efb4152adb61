"""What a prompt's text has of the store: the header that it begins with, and the stored chunks behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.prompt import Match, PromptPlan, Segment, plan_prompt
from fused_kv_llm.report import Outcome
from fused_kv_llm.store import ChunkRow
from fused_kv_llm.verdicts import SeenChunks

from .read_prompt import ReadPrompt

__all__ = ["MIN_REUSED_TOKENS", "ChunkFinder", "FoundChunks"]

MIN_REUSED_TOKENS = 8
"""Fewest tokens of a chunk that are worth reading."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundChunks:
    """What a prompt has of the store.

    Parameters
    ----------
    header_tokens : int
        Tokens of the header that it begins with.
    plan : PromptPlan
    matches : sequence of Match
        Where its text has stored chunks.
    rows : mapping of str to ChunkRow
        Of these chunks, by key.
    """

    header_tokens: int
    plan: PromptPlan
    matches: Sequence[Match] = ()
    rows: Mapping[str, ChunkRow] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The chunks behind the header."""
        return [one for one in self.plan.segments if one.key is not None and one.start >= self.header_tokens]

    @property
    def first_chunk(self) -> int:
        """Where the first of them begins; the number of the prompt's tokens if there is none."""
        segments = self.segments
        return segments[0].start if segments else len(self.plan.ids)

    def behind(self, prefix_tokens: int) -> list[Segment]:
        """Return what of the chunks stands behind a prefix, if it is worth reading."""
        cut = []
        for segment in self.segments:
            covered = max(0, prefix_tokens - segment.start)
            if covered == 0:
                cut.append(segment)
            elif segment.num_tokens - covered >= MIN_REUSED_TOKENS:
                cut.append(replace(segment, start=prefix_tokens, chunk_start=segment.chunk_start + covered))
        return cut

    def note_known(self, seen: SeenChunks, prefix_tokens: int) -> None:
        """Note which chunks a prefix contains, in whole or in part, and which are too short."""
        for segment in self.plan.segments:
            if segment.key is not None and segment.start < prefix_tokens:
                known = min(segment.stop, prefix_tokens) - segment.start
                seen.reused(segment.key, self.rows[segment.key].text, known)
        for unused in self.plan.unused:
            detail = f"Only {unused.tokens} of its tokens are the prompt's too; {MIN_REUSED_TOKENS} are needed."
            seen.failed(unused.match.key, self.rows[unused.match.key].text, Outcome.TOO_SHORT, detail)


class ChunkFinder:
    """Finds stored chunks in prompts.

    Parameters
    ----------
    catalog : ChunkCatalog
        Finds the store's chunks in a text.
    prefix_ids : sequence of int
        The ids that every prompt begins with, whose exact KV is in memory.
    """

    def __init__(self, catalog: ChunkCatalog, prefix_ids: Sequence[int]) -> None:
        self._catalog, self._prefix_ids = catalog, prefix_ids

    def find(self, read: ReadPrompt) -> FoundChunks:
        """Find what a prompt has of the store.

        Raises
        ------
        StoreUnavailableError
            If the store cannot be asked.
        """
        matches, rows = self._catalog.find(read.text)
        ids = {key: row.token_ids for key, row in rows.items()}
        plan = plan_prompt(read.encoded, matches, ids, MIN_REUSED_TOKENS)
        return FoundChunks(self._header_tokens(read), plan, matches, rows)

    def nothing(self, read: ReadPrompt) -> FoundChunks:
        """Return what a prompt has without the store: the header."""
        return FoundChunks(self._header_tokens(read), PromptPlan(read.ids, []))

    def _header_tokens(self, read: ReadPrompt) -> int:
        # Attention is causal, so any leading part of the prefix's KV is exact by itself.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(read.ids, self._prefix_ids, strict=False))
        return len(list(same))
