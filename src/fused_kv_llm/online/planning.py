"""Planning a request: render, tokenise, find the stored chunks, and open those whose KV is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.errors import PromptError, PromptTooLongError, StoreUnavailableError
from fused_kv_llm.kv import PlacedChunk, PrefixMatch
from fused_kv_llm.prompt import Encoded, Match, Prompt, PromptPlan, PromptRenderer, Segment, plan_prompt
from fused_kv_llm.report import FusionReport, Outcome
from fused_kv_llm.store import ChunkRow, KVStore, StoredKV, open_replacement
from fused_kv_llm.verdicts import JudgedPrompt, SeenChunks

from .request import Request

__all__ = ["MIN_REUSED_TOKENS", "ReadPrompt", "RequestPlanner", "TakeKV"]

TakeKV = Callable[[PlacedChunk, Sequence[str]], PlacedChunk]
"""Takes an open chunk and the keys of those before it in the prompt; returns what is used of it, open."""

_log = logging.getLogger(__name__)

MIN_REUSED_TOKENS = 8
"""Fewest tokens of a chunk that are worth reading."""

_WHY_GONE = {
    "damaged": (Outcome.DAMAGED, "Its file could not be used, and was put away."),
    "evicted": (Outcome.EVICTED, "It made room for other chunks while the prompt was planned."),
    "deleted": (Outcome.DELETED, "It was deleted while the prompt was planned."),
}


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt's text and tokens, which do not depend on what is stored.

    Parameters
    ----------
    text : str
        As the model gets it.
    encoded : Encoded
    """

    text: str
    encoded: Encoded

    @property
    def ids(self) -> list[int]:
        """Its token ids."""
        return self.encoded.ids


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What a text has of the store.

    Parameters
    ----------
    header_tokens : int
        Tokens of the header that it begins with.
    segments : list of Segment
        The chunks behind them.
    plan : PromptPlan
    matches : list of Match
    rows : mapping of str to ChunkRow
    """

    header_tokens: int
    segments: list[Segment]
    plan: PromptPlan
    matches: list[Match]
    rows: Mapping[str, ChunkRow]


class RequestPlanner:
    """Turns prompts into requests against one store.

    Parameters
    ----------
    renderer : PromptRenderer
    store : KVStore
    identity : str
        Only KV of this identity is used.
    prefix_ids : sequence of int
        The ids that every prompt begins with, whose exact KV is in memory.
    catalog : ChunkCatalog
        Finds the store's chunks in a text.
    context_length : int
        Longest prompt plus answer, in tokens.
    model_id : str
        For messages.
    on_missing : callable
        Called with the text of every chunk whose KV should be there and is not.
    replacement : str or None
        Name of the KV that is used in place of chunks' own, where they have it, see :func:`.open_replacement`.
    """

    def __init__(
        self,
        renderer: PromptRenderer,
        store: KVStore,
        identity: str,
        prefix_ids: Sequence[int],
        catalog: ChunkCatalog,
        context_length: int,
        model_id: str,
        on_missing: Callable[[str], None],
        replacement: str | None = None,
    ) -> None:
        self._renderer = renderer
        self._store = store
        self._identity = identity
        self._prefix_ids = prefix_ids
        self._context_length = context_length
        self._model_id = model_id
        self._on_missing = on_missing
        self._catalog = catalog
        self._replacement = replacement

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Render and tokenise a prompt.

        Raises
        ------
        PromptError, PromptTooLongError
            If it is empty or does not fit.
        """
        rendered = self._renderer.render(prompt)
        encoded = self._renderer.encode(rendered)
        if not encoded.ids:
            raise PromptError("The prompt is empty: there is no token to answer to.")
        if len(encoded.ids) >= self._context_length:
            raise PromptTooLongError(
                f"The prompt has {len(encoded.ids)} tokens, but {self._model_id!r} takes {self._context_length} with "
                "its answer. Retrieve fewer or shorter chunks."
            )
        return ReadPrompt(rendered.text, encoded)

    def cached_tokens(self, read: ReadPrompt, ratio: float, known: Callable[[list[int], int], int]) -> float:
        """Return how many of a prompt's tokens would not have to be computed now, as RAGCache counts (section 5.2).

        Parameters
        ----------
        read : ReadPrompt
        ratio : float
            The share of the chunks' tokens that is recomputed.
        known : callable
            How many first tokens earlier prompts have left, by a prompt's ids and where its first chunk begins.
        """
        found = self._find(read)
        prefix_tokens = max(found.header_tokens, known(read.ids, _first_chunk(found.segments, read)))
        left = _behind(found.segments, prefix_tokens)
        return prefix_tokens + (1.0 - ratio) * sum(segment.num_tokens for segment in left)

    def plan(
        self,
        prompt: Prompt | ReadPrompt,
        report: FusionReport,
        find_prefix: Callable[[list[int], int], PrefixMatch] | None = None,
        take: TakeKV | None = None,
        *,
        counted: bool = True,
        skip: Callable[[str], bool] = lambda key: False,
    ) -> Request:
        """Plan one prompt.

        Parameters
        ----------
        prompt : str, list of messages or ReadPrompt
        report : FusionReport
            Gets the chunks that were found but could not be opened.
        find_prefix : callable or None
            Finds what earlier prompts have left of this one, by its ids and where its first chunk begins; None uses the
            header's KV only.
        take : callable or None
            Exchanges a chunk's plain KV for a variant, see :meth:`.VariantChoice.take`; None uses plain KV.
        counted : bool
            Whether the chunks are used, for hit rates and policies, see :meth:`.KVStore.open`.
        skip : callable
            Whether a chunk, given by its key, is to be computed, since its KV does not come.

        Returns
        -------
        Request
            It owns the chunks that were opened: use it as a context manager.

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        """
        read = prompt if isinstance(prompt, ReadPrompt) else self.read(prompt)
        try:
            all_found = self._find(read)
        except StoreUnavailableError as error:
            # The answer needs nothing of the store.
            all_found = _Found(self._header_tokens(read), [], PromptPlan(read.ids, []), [], {})
            _warn_once(report, f"the store cannot be used now, so no chunk was looked for: {error}")
        header_tokens, found, rows = all_found.header_tokens, all_found.segments, all_found.rows
        chunks: list[PlacedChunk] = []
        seen = SeenChunks(report)
        with ExitStack() as opened:
            match = None if find_prefix is None else find_prefix(read.ids, _first_chunk(found, read))
            if match is not None:
                opened.callback(match.release)
            prefix_tokens = header_tokens if match is None else max(header_tokens, match.num_tokens)
            left = _behind(found, prefix_tokens)
            _note_known(seen, all_found, min(prefix_tokens, len(read.ids) - 1))
            for segment in left:
                if segment.key is None:
                    continue
                text = rows[segment.key].text
                if skip(segment.key):
                    _report_skipped(report, segment.key)
                    seen.failed(segment.key, text, Outcome.NOT_LOADED, "It did not come within load_timeout_s.")
                    continue
                stored = self._open(segment.key, rows[segment.key].token_ids, counted=counted)
                if stored is not None:
                    chunk = PlacedChunk(segment, opened.enter_context(stored))
                    if take is not None:
                        chunk = take(chunk, [str(one.key) for one in found if one.start < segment.start])
                        opened.enter_context(chunk.stored)
                    chunks.append(chunk)
                    # The last token of a prompt is computed whatever it is.
                    seen.reused(segment.key, text, min(segment.stop, len(read.ids) - 1) - segment.start)
                    continue
                report.chunks_missed += 1
                report.warnings.append(f"chunk {segment.key[:16]} could not be read and was computed instead")
                seen.failed(segment.key, text, *self._why_missing(segment.key))
                self._on_missing(text)
            request = Request(read.ids, header_tokens, chunks, read.text, read.encoded.offsets)
            request.segments = tuple(found)
            request.num_covered = len(found) - len(left)
            spans = [(match.start, match.end) for match in all_found.matches]
            request.judged = JudgedPrompt(read.text, seen.finish(), spans)
            if match is not None:
                request.since = match.version
                if prefix_tokens > header_tokens:
                    request.begin_after(match)
                else:
                    match.release()
            opened.pop_all()
        return request

    def _find(self, read: ReadPrompt) -> _Found:
        """Find how many tokens of the header a prompt begins with, and the stored chunks behind them."""
        header_tokens = self._header_tokens(read)
        matches, rows = self._catalog.find(read.text)
        ids = {key: row.token_ids for key, row in rows.items()}
        plan = plan_prompt(read.encoded, matches, ids, MIN_REUSED_TOKENS)
        found = [segment for segment in plan.segments if segment.key is not None and segment.start >= header_tokens]
        return _Found(header_tokens, found, plan, matches, rows)

    def _why_missing(self, key: str) -> tuple[Outcome, str]:
        """Return why a chunk that was found could not be opened."""
        unknown = (Outcome.NOT_LOADED, "Its KV is stored, and could not be read.")
        try:
            return _WHY_GONE.get(self._store.departures([key]).get(key, ""), unknown)
        except StoreUnavailableError:
            return unknown

    def _header_tokens(self, read: ReadPrompt) -> int:
        # Attention is causal, so any leading part of the prefix's KV is exact by itself.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(read.ids, self._prefix_ids, strict=False))
        return len(list(same))

    def _open(self, key: str, token_ids: Sequence[int], *, counted: bool) -> StoredKV | None:
        try:
            stored = self._store.open(key, token_ids, counted=counted)
        except StoreUnavailableError as error:
            _log.warning("The store cannot be used now, so a chunk is computed: %s", error)
            return None
        if stored is None:
            return None
        if stored.identity == self._identity:
            return stored if self._replacement is None else self._replaced(stored, self._replacement)
        # The file's checksummed header outranks the index, which could have been altered by hand.
        stored.close()
        self._store.discard(key, "its file holds the KV of another model or configuration")
        return None

    def _replaced(self, stored: StoredKV, name: str) -> StoredKV:
        try:
            return open_replacement(self._store.sidecars, stored, name)
        except BaseException:
            stored.close()
            raise


def _note_known(seen: SeenChunks, found: _Found, prefix_tokens: int) -> None:
    """Note which chunks the prefix contains, in whole or in part, and which are too short."""
    for segment in found.plan.segments:
        if segment.key is not None and segment.start < prefix_tokens:
            known = min(segment.stop, prefix_tokens) - segment.start
            seen.reused(segment.key, found.rows[segment.key].text, known)
    for unused in found.plan.unused:
        text = found.rows[unused.match.key].text
        detail = f"Only {unused.tokens} of its tokens are the prompt's too; {MIN_REUSED_TOKENS} are needed."
        seen.failed(unused.match.key, text, Outcome.TOO_SHORT, detail)


def _report_skipped(report: FusionReport, key: str) -> None:
    if _warn_once(report, f"chunk {key[:16]} did not come within load_timeout_s and was computed instead"):
        report.chunks_missed += 1


def _warn_once(report: FusionReport, warning: str) -> bool:
    """Put a warning into a report, unless an earlier plan of the same prompt has done so."""
    if warning in report.warnings:
        return False
    report.warnings.append(warning)
    return True


def _first_chunk(found: Sequence[Segment], read: ReadPrompt) -> int:
    return found[0].start if found else len(read.ids)


def _behind(segments: Sequence[Segment], prefix_tokens: int) -> list[Segment]:
    """Return what of chunks' segments stands behind the prefix, if it is worth reading."""
    cut = []
    for segment in segments:
        covered = max(0, prefix_tokens - segment.start)
        if covered == 0:
            cut.append(segment)
        elif segment.num_tokens - covered >= MIN_REUSED_TOKENS:
            cut.append(replace(segment, start=prefix_tokens, chunk_start=segment.chunk_start + covered))
    return cut
