"""The chunks an engine has KV of: computing it, keeping it in step with a corpus, having it at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm.engine.parts import EngineParts
from fused_kv_llm.errors import CorpusError
from fused_kv_llm.offline import GivenNeighbours
from fused_kv_llm.online import view_of
from fused_kv_llm.report import FusionReport, IngestReport
from fused_kv_llm.selectors import Selector, View, resolve_selector

__all__ = ["EngineCorpus"]


class EngineCorpus(EngineParts):
    """What is done with chunks, before they are asked about; ``FusedKVEngine`` is one."""

    def build_kv_cache(
        self,
        texts: Iterable[str],
        *,
        neighbours: GivenNeighbours | None = None,
        refresh: bool = False,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill every chunk once and store its KV; resumes where an interrupted call stopped.

        Parameters
        ----------
        texts : iterable of str
            One chunk each, as they will stand in prompts.
        neighbours : mapping, callable or None
            A caller's own graph, text to similar or linked texts, nearest first; None asks the embedder. Only
            used with ``preprocessing="similar"``.
        refresh : bool
            Whether chunks stored earlier whose neighbours have changed are prefilled again; they are counted
            in ``chunks_stale`` otherwise and stay usable.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there is nothing to ingest, or one string was given instead of several.
        StoreFullError
            If the disk cannot hold the result.
        """
        chunks = list(_several(texts))
        report = self._ingestor.run(chunks, neighbours=neighbours, refresh=refresh, progress=progress)
        self.build_anchors(chunks, progress=progress)
        return report

    def build_anchors(
        self, texts: Iterable[str], *, selector: str | Selector | None = None, progress: bool = True
    ) -> int:
        """Store the anchors of chunks that are stored already, for selectors that probe with anchors (QCFuse).

        :meth:`build_kv_cache` does it when the engine's own selector needs them.

        Parameters
        ----------
        texts : iterable of str
            The chunks.
        selector : str, Selector or None
            Whose anchors; None is the engine's. One that needs none does nothing.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        int
            Chunks whose anchors are new.
        """
        chosen = self._selector if selector is None else resolve_selector(selector)
        view = view_of(chosen, self.loaded, FusionReport())
        if not isinstance(view, View) or view.anchors is None:
            return 0
        keys = self._keys_of([text.strip() for text in _several(texts)])
        return self._anchors.run((key for key in keys if key), view.anchors, view.layers, progress=progress)

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
        rows = self._catalog.rows_of([text.strip() for text in _several(texts)])
        self.store.delete({row.key for found in rows.values() for row in found})
        return len(rows)

    def chunk_id(self, text: str) -> str | None:
        """Return the key of a chunk's stored KV, or None where none is stored."""
        return self._keys_of([text.strip()])[0]

    def prefetch(self, texts: Iterable[str]) -> list[str | None]:
        """Start loading the KV of retrieved chunks into memory.

        Parameters
        ----------
        texts : iterable of str
            Retrieved chunks. Those without KV are remembered: if the next prompts contain them, they are
            ingested afterwards (`store_misses`).

        Returns
        -------
        list of str or None
            Their keys; None where no KV is stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        retrieved = [text.strip() for text in _several(texts)]
        keys = self._keys_of(retrieved)
        self.store.prefetch([key for key in keys if key is not None])
        if self._background is not None:
            self._background.expect(text for text, key in zip(retrieved, keys, strict=True) if key is None)
        return keys

    def _keys_of(self, texts: Sequence[str]) -> list[str | None]:
        rows = self._catalog.rows_of(texts)
        return [rows[text][-1].key if text in rows else None for text in texts]

    def stored_texts(self) -> list[str]:
        """Return the text of every chunk whose KV is stored for this model, in the order of ingestion."""
        return list(dict.fromkeys(row.text for row in self._catalog.all_rows()))

    def wait_for_background(self) -> None:
        """Return when no background ingestion is under way."""
        if self._background is not None:
            self._background.wait()


def _several(texts: Iterable[str]) -> Iterable[str]:
    """Refuse one string, which would be read as one chunk a character."""
    if isinstance(texts, str):
        raise CorpusError(f"texts={texts[:40]!r} is one string: pass a list of chunks, [text] for a single one.")
    return texts
