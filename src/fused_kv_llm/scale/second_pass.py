"""The second pass of a distributed ingestion, as the driver sees it: neighbours and batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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
    group_tokens,
    progress_bar,
    similar_groups,
)
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import KVStore, StoredElsewhere

from .actor_pool import ActorPool
from .neighbours import ShardedSearch
from .prefill_actor import CorpusFacts, Preprocessed

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
        Most tokens of a batch behind contexts (``"fusionrag"``), if fewer than this pass has anyway.
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
        self._plans = PreprocessingPlanner(store, catalog, self._identity, facts.max_tokens, searched)

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
        planned = [replace(_part(plan, batch), is_batch=True) for batch in self._batches(plan)]
        for number, done in self._pool.run("preprocess", ((batch,) for batch in planned)):
            yield planned[number], done

    def _batches(self, plan: PreprocessingPlan) -> Iterable[list[PendingChunk]]:
        facts, per_token = self._facts, self._facts.kv_bytes_per_token
        if self._similarity.replaces:
            return context_batches(plan.chunks, lambda: self._batch_tokens, plan.token_ids, per_token)
        most = group_tokens(facts.max_tokens, per_token)
        return similar_groups(plan.chunks, most, facts.separator_tokens)

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
