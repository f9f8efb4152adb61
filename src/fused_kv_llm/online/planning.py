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
from fused_kv_llm.prompt import Encoded, Prompt, PromptRenderer, Segment, plan_prompt
from fused_kv_llm.report import FusionReport
from fused_kv_llm.store import ChunkRow, KVStore, StoredKV

from .request import Request

__all__ = ["ReadPrompt", "RequestPlanner", "TakeKV"]

TakeKV = Callable[[PlacedChunk, Sequence[str]], PlacedChunk]
"""Takes an open chunk and the keys of those before it in the prompt; returns what is used of it, open."""

_log = logging.getLogger(__name__)

_MIN_REUSED_TOKENS = 8


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
    ) -> None:
        self._renderer = renderer
        self._store = store
        self._identity = identity
        self._prefix_ids = prefix_ids
        self._context_length = context_length
        self._model_id = model_id
        self._on_missing = on_missing
        self._catalog = catalog

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
        header_tokens, found, _ = self._find(read)
        prefix_tokens = max(header_tokens, known(read.ids, _first_chunk(found, read)))
        left = _behind(found, prefix_tokens)
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
            header_tokens, found, rows = self._find(read)
        except StoreUnavailableError as error:
            # The answer needs nothing of the store.
            header_tokens, found, rows = self._header_tokens(read), [], {}
            _warn_once(report, f"the store cannot be used now, so no chunk was looked for: {error}")
        chunks: list[PlacedChunk] = []
        with ExitStack() as opened:
            match = None if find_prefix is None else find_prefix(read.ids, _first_chunk(found, read))
            if match is not None:
                opened.callback(match.release)
            prefix_tokens = header_tokens if match is None else max(header_tokens, match.num_tokens)
            left = _behind(found, prefix_tokens)
            for segment in left:
                if segment.key is None:
                    continue
                if skip(segment.key):
                    _report_skipped(report, segment.key)
                    continue
                stored = self._open(segment.key, rows[segment.key].token_ids, counted=counted)
                if stored is not None:
                    chunk = PlacedChunk(segment, opened.enter_context(stored))
                    if take is not None:
                        chunk = take(chunk, [str(one.key) for one in found if one.start < segment.start])
                        opened.enter_context(chunk.stored)
                    chunks.append(chunk)
                    continue
                report.chunks_missed += 1
                report.warnings.append(f"chunk {segment.key[:16]} could not be read and was computed instead")
                self._on_missing(rows[segment.key].text)
            request = Request(read.ids, header_tokens, chunks, read.text, read.encoded.offsets)
            request.segments = tuple(found)
            request.num_covered = len(found) - len(left)
            if match is not None:
                request.since = match.version
                if prefix_tokens > header_tokens:
                    request.begin_after(match)
                else:
                    match.release()
            opened.pop_all()
        return request

    def _find(self, read: ReadPrompt) -> tuple[int, list[Segment], Mapping[str, ChunkRow]]:
        """Return how many tokens of the header a prompt begins with, and the stored chunks behind them."""
        header_tokens = self._header_tokens(read)
        matches, rows = self._catalog.find(read.text)
        ids = {key: row.token_ids for key, row in rows.items()}
        plan = plan_prompt(read.encoded, matches, ids, _MIN_REUSED_TOKENS)
        found = [segment for segment in plan.segments if segment.key is not None and segment.start >= header_tokens]
        return header_tokens, found, rows

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
        if stored is None or stored.identity == self._identity:
            return stored
        # The file's checksummed header outranks the index, which could have been altered by hand.
        stored.close()
        self._store.discard(key, "its file holds the KV of another model or configuration")
        return None


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
        elif segment.num_tokens - covered >= _MIN_REUSED_TOKENS:
            cut.append(replace(segment, start=prefix_tokens, chunk_start=segment.chunk_start + covered))
    return cut
