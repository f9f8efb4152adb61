"""The second pass of a distributed ingestion, as the driver sees it: neighbours, the shift map, and the batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.offline import (
    CONTEXT_BATCH_TOKENS,
    PassCounts,
    PendingChunk,
    PreprocessingPlan,
    PreprocessingPlanner,
    Similarity,
    context_batches,
    progress_bar,
    prompts_of_chunks,
    shift_map_name,
)
from fused_kv_llm.paths import write_atomically
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import KVStore, StoredElsewhere

from .actor_pool import ActorPool
from .neighbours import ShardedSearch
from .prefill_actor import CorpusFacts, Preprocessed
from .resources import import_ray

__all__ = ["SecondPass"]


class SecondPass:
    """Has actors preprocess what is stored and is not preprocessed yet.

    Parameters
    ----------
    pool : ActorPool
    store : KVStore
        The driver's, whose remote tier is the shared store.
    facts : CorpusFacts
    similarity : Similarity
        How similar chunks are found; the search among their vectors is done by Ray tasks.
    batch_tokens : int or None
        Most tokens of a batch, if fewer than this pass has anyway.
    """

    def __init__(
        self,
        pool: ActorPool[CorpusFacts],
        store: KVStore,
        facts: CorpusFacts,
        similarity: Similarity,
        batch_tokens: int | None,
    ) -> None:
        self._pool, self._store, self._facts, self._similarity = pool, store, facts, similarity
        self._batch_tokens = min(CONTEXT_BATCH_TOKENS, batch_tokens or CONTEXT_BATCH_TOKENS)
        self._identity = facts.identity.digest
        catalog = ChunkCatalog(store, self._identity)
        searched = replace(similarity, search=similarity.search or ShardedSearch())
        self._plans = PreprocessingPlanner(
            store, catalog, self._identity, facts.max_tokens, searched, len(facts.separator_ids)
        )

    def run(self, report: IngestReport, *, refresh: bool, progress: bool) -> None:
        """Preprocess what is not preprocessed yet.

        Parameters
        ----------
        report : IngestReport
            Gets the counts.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.
        progress : bool
            Whether to show a progress bar.

        Raises
        ------
        MissingExtraError
            If packages that find neighbours are not installed.
        FusedKVError
            What an actor has raised; what was stored stays.
        """
        started = time.perf_counter()
        try:
            plan = self._plans.plan(refresh=refresh)
            counts = PassCounts(len(plan.chunks), sum(len(chunk.token_ids) for chunk in plan.chunks))
            with progress_bar("Preprocessing chunks", counts, enabled=progress) as show:
                if plan.chunks:
                    for batch, done in self._preprocess(plan):
                        self._note(plan, batch, done, counts, report)
                        show()
            report.chunks_stale, report.chunks_pending = plan.stale, self._plans.lacking()
            report.bytes_written += counts.nbytes
        finally:
            self._plans.graph.close()
            report.preprocessing_seconds = time.perf_counter() - started

    def _preprocess(self, plan: PreprocessingPlan) -> Iterator[tuple[PreprocessingPlan, Preprocessed]]:
        facts = self._facts
        separator = 0 if self._similarity.replaces else len(facts.separator_ids)
        together = context_batches(
            plan.chunks, lambda: self._batch_tokens, plan.token_ids, facts.kv_bytes_per_token, separator
        )
        planned = [replace(_part(plan, batch), is_batch=True) for batch in together]
        shift_map = import_ray().put(self._shift_map(plan))
        for number, done in self._pool.run("preprocess", ((batch, shift_map) for batch in planned)):
            yield planned[number], done

    def _shift_map(self, plan: PreprocessingPlan) -> bytes | None:
        """Return the corpus's map: the store's, or one that an actor fits now; None where there are too few chunks.

        A file that is damaged, or a map of another shape, is replaced.
        """
        if not self._facts.has_shift_map:
            return None
        name = shift_map_name(self._identity, self._similarity.count)
        known, path = self._store.shared.read_file(name), self._store.kv_dir / name
        if known is not None and self._takes(plan, known):
            return known
        # Of an ingestion by one process.
        local = path.read_bytes() if path.exists() else None
        if local is not None and local != known and self._takes(plan, local):
            self._store.shared.write_file(name, local)
            return local
        facts = self._facts
        prompts = prompts_of_chunks(
            plan.chunks, plan.token_ids, facts.header_ids, facts.separator_ids, facts.max_tokens
        )
        if not prompts:
            return None
        keys = {segment.key for prompt in prompts for segment in prompt.segments}
        part = _part(plan, [chunk for chunk in plan.chunks if chunk.key in keys])
        made: bytes = self._pool.call("fit", part, prompts)
        self._store.shared.write_file(name, made)
        # Engines over this folder use it too, and fit none of their own.
        write_atomically(path, made)
        return made

    def _takes(self, plan: PreprocessingPlan, shift_map: bytes) -> bool:
        # The driver has no model, and so does not know the shape that a map must have.
        takes: bool = self._pool.call("takes", _part(plan, plan.chunks[:1]), shift_map)
        return takes

    def _note(
        self,
        plan: PreprocessingPlan,
        batch: PreprocessingPlan,
        done: Preprocessed,
        counts: PassCounts,
        report: IngestReport,
    ) -> None:
        rows = self._store.rows(done.sidecars)
        self._store.shared.note(
            StoredElsewhere(row, content_hash(row.text), done.sidecars[key]) for key, row in rows.items()
        )
        for chunk in batch.chunks:
            if chunk.key not in done.written:
                continue
            self._plans.graph.preprocessed(chunk.key, plan.neighbours[chunk.key])
            counts.add(len(chunk.token_ids), done.written[chunk.key])
            if chunk.key in plan.refreshed:
                report.chunks_refreshed += 1
            else:
                report.chunks_preprocessed += 1
        report.neighbour_tokens += done.neighbour_tokens


def _part(plan: PreprocessingPlan, chunks: list[PendingChunk]) -> PreprocessingPlan:
    """Return the part of a plan that some of its chunks need."""
    keys = dict.fromkeys(key for chunk in chunks for key in (chunk.key, *chunk.neighbours))
    # An actor needs no texts.
    return PreprocessingPlan(
        [replace(chunk, text="") for chunk in chunks],
        neighbours={chunk.key: plan.neighbours[chunk.key] for chunk in chunks},
        token_ids={key: plan.token_ids[key] for key in keys},
    )
