"""What an engine does with chunks: store their KV, preprocess it, delete it, load it ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from fused_kv_llm.chunk import chunk_text
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.offline import GivenNeighbours, Preprocess
from fused_kv_llm.online import view_of
from fused_kv_llm.report import FusionReport, IngestReport
from fused_kv_llm.selectors import Selector, resolve_selector

from .state import EngineState

__all__ = ["ChunkMethods"]


class ChunkMethods(EngineState):
    """The methods of an engine that take chunks."""

    def build_kv_cache(
        self,
        texts: Iterable[str],
        *,
        neighbours: GivenNeighbours | None = None,
        preprocess: Preprocess = "background",
        refresh: bool = False,
        variant_contexts: int = 0,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill every chunk once and store its KV; resumes where an interrupted call stopped.

        Chunks can be asked about as soon as their KV is stored. With ``preprocessing="similar"`` a second, longer
        pass follows, which brings their KV closer to what it would be at a later place in a prompt.

        Parameters
        ----------
        texts : iterable of str
            One chunk each, as they will stand in prompts.
        neighbours : mapping, callable or None
            A caller's own graph, text to similar or linked texts, nearest first. It is remembered for these texts;
            one that it does not know has no neighbours. None asks the embedder, but for texts whose neighbours were
            given at an earlier call. Only used with ``preprocessing="similar"``.
        preprocess : {"background", "wait", "later"}
            When stored chunks that are not preprocessed yet, of this call or an earlier one, get it: in the
            background, beside requests; before this call returns; or not yet. The pass may be stopped at any
            time, by :meth:`close` or a kill, and goes on with the next call.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again. Otherwise they stay usable and
            are counted in ``chunks_stale``.
        variant_contexts : int
            Behind how many contexts of three similar chunks each chunk that is preprocessed is also kept as a variant,
            for engines with ``variants``. Each takes a prefill of all four, in the background or before this returns
            as `preprocess` says.
        progress : bool
            Whether to show progress: a bar for each pass, or lines where the output is no terminal. Work in the
            background shows none; see :meth:`wait_for_background`.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there is nothing to ingest, or one string was given instead of several.
        MissingExtraError
            If packages that find similar chunks are not installed.
        StoreFullError
            If the disk cannot hold the result.
        """
        if preprocess not in get_args(Preprocess):
            raise ConfigError(f"preprocess={preprocess!r} is unknown: use 'background', 'wait' or 'later'")
        if variant_contexts and (self.corpus.variants is None or self.config.preprocessing == "none"):
            raise ConfigError(
                f"variant_contexts={variant_contexts!r} keeps nothing: make the engine with variants=... and "
                'preprocessing="similar", whose contexts are used'
            )
        chunks = list(texts) if not isinstance(texts, str) else texts
        report = self.corpus.ingest(chunks, neighbours, progress=progress)
        self.build_anchors(chunks, progress=progress)
        self._preprocess(report, preprocess, refresh=refresh, progress=progress, contexts=variant_contexts)
        return report

    def preprocess(self, *, refresh: bool = False, progress: bool = True) -> IngestReport:
        """Preprocess all stored chunks that are not preprocessed yet, and return when it is done.

        This is the second pass of :meth:`build_kv_cache`, for a store that was filled before.

        Parameters
        ----------
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.
        progress : bool
            Whether to show progress.

        Returns
        -------
        IngestReport

        Raises
        ------
        MissingExtraError
            If packages that find similar chunks are not installed.
        StoreFullError
            If the disk cannot hold the result.
        """
        report = IngestReport()
        self._preprocess(report, "wait", refresh=refresh, progress=progress)
        return report

    def _preprocess(
        self, report: IngestReport, when: Preprocess, *, refresh: bool, progress: bool, contexts: int = 0
    ) -> None:
        try:
            self.corpus.preprocess(report, when, refresh=refresh, progress=progress, contexts=contexts)
        finally:
            if refresh:
                self.clear_prefix_cache()

    def build_anchors(
        self, texts: Iterable[str], *, selector: str | Selector | None = None, progress: bool = True
    ) -> int:
        """Store the anchors of chunks that are stored already, for selectors that probe with anchors (QCFuse).

        :meth:`build_kv_cache` does it when the engine's own selector needs them.

        Parameters
        ----------
        texts : iterable of str
        selector : str, Selector or None
            Whose anchors; None is the engine's. For one that needs none, nothing is done.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        int
            Chunks whose anchors are new.
        """
        chosen = self._selector if selector is None else resolve_selector(selector)
        return self.corpus.build_anchors(
            texts, view_of(chosen, self.loaded, self.requests.context.shift_name, FusionReport()), progress=progress
        )

    def delete_chunks(self, texts: Iterable[str]) -> int:
        """Delete the stored KV of chunks that left the corpus; texts without KV are passed over.

        Parameters
        ----------
        texts : iterable of str

        Returns
        -------
        int
            How many chunks were stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        try:
            return self.corpus.delete(texts)
        finally:
            self.clear_prefix_cache()

    def clear_prefix_cache(self) -> None:
        """Forget the KV of answered prompts; deleting chunks does it too, since prompts may have contained them."""
        self.requests.prefixes.clear()
        self._orders.clear()

    def prefetch(self, texts: Iterable[str]) -> list[str | None]:
        """Start loading the KV of retrieved chunks into memory, with the sidecars that the engine's selector reads.

        Parameters
        ----------
        texts : iterable of str
            Retrieved chunks. With `store_misses`, those without KV are stored at once if an answered prompt has left
            their KV right behind the header, and otherwise ingested after the next request whose prompt contains them.

        Returns
        -------
        list of str or None
            Their keys; None where no KV is stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        return self.corpus.prefetch(
            texts, view_of(self._selector, self.loaded, self.requests.context.shift_name, FusionReport())
        )

    def order_chunks(self, texts: Sequence[str], *, remember: bool = True) -> list[int]:
        """Return an order of retrieved chunks in which their prompt begins as an earlier one did.

        At ratio 1 the prefix that both have in common is not computed again then. The order of chunks is part of the
        prompt, so answers may change.

        Parameters
        ----------
        texts : sequence of str
            Retrieved chunks, the best first.
        remember : bool
            Whether they are going to be asked about in this order.

        Returns
        -------
        list of int
            Places in `texts`: first the chunks that an earlier prompt began with, as they stood there, then the others
            as given.

        Raises
        ------
        CorpusError
            If one string was given instead of several, or a chunk is not text.
        """
        return self._orders.order(texts, remember=remember)

    def chunk_id(self, text: str) -> str | None:
        """Return the key of a chunk's stored KV, or None where none is stored."""
        return self.corpus.keys_of([chunk_text(text)])[0]

    def stored_texts(self) -> list[str]:
        """Return the text of every chunk whose KV is stored for this model, in the order of ingestion."""
        return self.corpus.stored_texts()

    def wait_for_background(self, *, progress: bool = False) -> None:
        """Return when no ingestion is under way in the background.

        Parameters
        ----------
        progress : bool
            Whether to show the progress of preprocessing.

        Raises
        ------
        FusedKVError
            What ended the preprocessing.
        """
        self.corpus.wait(progress=progress)
