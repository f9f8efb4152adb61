"""The first pass of a distributed ingestion, as the driver sees it: what is new, in which batches, what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import chunk_text, chunk_texts
from fused_kv_llm.errors import PromptError
from fused_kv_llm.offline import CorpusPlanner, PassCounts, PendingChunk, batches, progress_bar
from fused_kv_llm.prompt import content_hash, is_indexable
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import ChunkRow, KVStore, StoredElsewhere

from .actor_pool import ActorPool
from .prefill_actor import CorpusFacts, StoredChunk

__all__ = ["FirstPass"]

_TEXTS_AT_ONCE = 512


class FirstPass:
    """Has actors tokenise and prefill chunks, and keeps the driver's index in step.

    Parameters
    ----------
    pool : ActorPool
    store : KVStore
        The driver's, whose remote tier is the shared store.
    facts : CorpusFacts
    batch_tokens : int
        Most tokens of a batch.
    """

    def __init__(self, pool: ActorPool[CorpusFacts], store: KVStore, facts: CorpusFacts, batch_tokens: int) -> None:
        self._pool, self._store, self._facts, self._batch_tokens = pool, store, facts, batch_tokens
        self._identity = facts.identity.digest

    def run(self, texts: Iterable[str], report: IngestReport, *, progress: bool) -> set[str]:
        """Prefill and store every text that is not in the shared store.

        Parameters
        ----------
        texts : iterable of str
        report : IngestReport
            Gets the counts.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        set of str
            The keys of all chunks of the corpus.

        Raises
        ------
        CorpusError
            If there are no texts, or something that is not text.
        FusedKVError
            What an actor has raised; what was stored stays.
        """
        given = chunk_texts(texts)
        ids = self._token_ids(dict.fromkeys(text for text in given if is_indexable(text)))

        def encode(text: str) -> list[int]:
            found = ids[chunk_text(text)]
            if isinstance(found, str):
                raise PromptError(found)
            return list(found)

        catalog = ChunkCatalog(self._store, self._identity)
        planner = CorpusPlanner(catalog, self._identity, encode, self._facts.max_tokens)
        chunks, new = planner.plan(given, report)
        # What this machine's folder has from before is not computed again either.
        report.bytes_written += self._store.shared.publish()
        self._prefill(new, report, progress=progress)
        return {chunk.key for chunk in chunks}

    def prune(self, kept: set[str]) -> int:
        """Delete the chunks of this model and tenant that are not in the corpus; return how many."""
        gone = [key for key in self._store.keys(self._identity) if key not in kept]
        return self._store.delete(gone)

    def _token_ids(self, texts: Iterable[str]) -> dict[str, tuple[int, ...] | str]:
        wanted = list(texts)
        groups = [wanted[at : at + _TEXTS_AT_ONCE] for at in range(0, len(wanted), _TEXTS_AT_ONCE)]
        found: dict[str, tuple[int, ...] | str] = {}
        for number, ids in self._pool.run("describe", ((group,) for group in groups)):
            found.update(zip(groups[number], ids, strict=True))
        return found

    def _prefill(self, new: Sequence[PendingChunk], report: IngestReport, *, progress: bool) -> None:
        planned = list(batches(new, lambda: self._batch_tokens, {}, 0))
        counts = PassCounts(len(new), sum(len(chunk.token_ids) for chunk in new))
        with progress_bar("Prefilling chunks", counts, enabled=progress) as show:
            for number, stored in self._pool.run("prefill", ((batch,) for batch in planned)):
                self._note(planned[number], stored)
                for chunk, one in zip(planned[number], stored, strict=True):
                    # Stored by an actor that died, or by another ingestion: it was not new here, but it is done.
                    counts.add(len(chunk.token_ids), one.nbytes if one.is_new else 0)
                show()
        report.chunks_new, report.tokens = counts.chunks, counts.tokens
        report.bytes_written += counts.nbytes

    def _note(self, batch: Sequence[PendingChunk], stored: Sequence[StoredChunk]) -> None:
        position = self._facts.header_tokens
        self._store.shared.note(
            StoredElsewhere(
                ChunkRow(chunk.key, self._identity, chunk.text, chunk.token_ids, position, one.nbytes),
                content_hash(chunk.text),
            )
            for chunk, one in zip(batch, stored, strict=True)
        )
