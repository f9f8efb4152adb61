"""Planning a request: render, tokenise, find the stored chunks, and open those whose KV is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fused_kv_llm.errors import PromptError, PromptTooLongError, StoreUnavailableError
from fused_kv_llm.kv import PlacedChunk, PrefixMatch
from fused_kv_llm.prompt import Prompt, PromptRenderer, Segment
from fused_kv_llm.report import FusionReport, Outcome
from fused_kv_llm.verdicts import JudgedPrompt, SeenChunks

from .chunk_opener import ChunkOpener
from .found_chunks import ChunkFinder, FoundChunks
from .read_prompt import ReadPrompt
from .request import Request

__all__ = ["RequestPlanner", "TakeKV"]

TakeKV = Callable[[PlacedChunk, Sequence[str]], PlacedChunk]
"""Takes an open chunk and the keys of those before it in the prompt; returns what is used of it, open."""


@dataclass(frozen=True, slots=True, eq=False)
class _Opening:
    """How the chunks of a prompt are opened; see :meth:`RequestPlanner.plan`."""

    found: FoundChunks
    report: FusionReport
    seen: SeenChunks
    take: TakeKV | None
    counted: bool
    skip: Callable[[str], bool]


class RequestPlanner:
    """Turns prompts into requests against one store.

    Parameters
    ----------
    renderer : PromptRenderer
    finder : ChunkFinder
        Finds the store's chunks in a prompt.
    opener : ChunkOpener
        Opens them.
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
        finder: ChunkFinder,
        opener: ChunkOpener,
        context_length: int,
        model_id: str,
        on_missing: Callable[[str], None],
    ) -> None:
        self._renderer, self._finder, self._opener = renderer, finder, opener
        self._context_length = context_length
        self._model_id = model_id
        self._on_missing = on_missing

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
        found = self._finder.find(read)
        prefix_tokens = max(found.header_tokens, known(read.ids, found.first_chunk))
        return prefix_tokens + (1.0 - ratio) * sum(segment.num_tokens for segment in found.behind(prefix_tokens))

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
        found, seen = self._found(read, report), SeenChunks(report)
        segments = found.segments
        with ExitStack() as opened:
            match = None if find_prefix is None else find_prefix(read.ids, found.first_chunk)
            if match is not None:
                opened.callback(match.release)
            prefix_tokens = found.header_tokens if match is None else max(found.header_tokens, match.num_tokens)
            left = found.behind(prefix_tokens)
            found.note_known(seen, min(prefix_tokens, len(read.ids) - 1))
            opening = _Opening(found, report, seen, take, counted, skip)
            placed = [self._open(segment, opening, opened) for segment in left]
            chunks = [chunk for chunk in placed if chunk is not None]
            request = Request(read.ids, found.header_tokens, chunks, read.text, read.encoded.offsets)
            request.segments = tuple(segments)
            request.num_covered = len(segments) - len(left)
            request.judged = JudgedPrompt(read.text, seen.finish(), [(one.start, one.end) for one in found.matches])
            if match is not None:
                request.since = match.version
                if prefix_tokens > found.header_tokens:
                    request.begin_after(match)
                else:
                    match.release()
            opened.pop_all()
        return request

    def _found(self, read: ReadPrompt, report: FusionReport) -> FoundChunks:
        try:
            return self._finder.find(read)
        except StoreUnavailableError as error:
            # The answer needs nothing of the store.
            _warn_once(report, f"the store cannot be used now, so no chunk was looked for: {error}")
            return self._finder.nothing(read)

    def _open(self, segment: Segment, how: _Opening, opened: ExitStack) -> PlacedChunk | None:
        """Return a chunk, open, or None if it is computed; the report says why."""
        key = str(segment.key)
        row = how.found.rows[key]
        if how.skip(key):
            if _warn_once(how.report, f"chunk {key[:16]} did not come within load_timeout_s and was computed instead"):
                how.report.chunks_missed += 1
            how.seen.failed(key, row.text, Outcome.NOT_LOADED, "It did not come within load_timeout_s.")
            return None
        stored = self._opener.open(key, row.token_ids, counted=how.counted)
        if stored is None:
            how.report.chunks_missed += 1
            how.report.warnings.append(f"chunk {key[:16]} could not be read and was computed instead")
            how.seen.failed(key, row.text, *self._opener.why_missing(key))
            self._on_missing(row.text)
            return None
        chunk = PlacedChunk(segment, opened.enter_context(stored))
        if how.take is not None:
            chunk = how.take(chunk, [str(one.key) for one in how.found.segments if one.start < segment.start])
            opened.enter_context(chunk.stored)
        # The last token of a prompt is computed whatever it is.
        last = len(how.found.plan.ids) - 1
        how.seen.reused(key, row.text, min(segment.stop, last) - segment.start)
        return chunk


def _warn_once(report: FusionReport, warning: str) -> bool:
    """Put a warning into a report, unless an earlier plan of the same prompt has done so."""
    if warning in report.warnings:
        return False
    report.warnings.append(warning)
    return True
