"""The second pass for a sample of questions: of a whole corpus, only the prompts that show a chunk that is asked about.

Neighbours and groups are those of the whole corpus, so every asked chunk gets the context shift that ingesting the
whole corpus into an empty folder would give it, for a fraction of the time. The default preprocessing only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_PREPROCESSING
from fused_kv_llm.offline import VECTORS_FILE, as_embedder, corpus_vectors
from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.context_prefill import ContextPrefill
from fused_kv_llm.offline.neighbour_index import NeighbourIndex
from fused_kv_llm.offline.preprocessing_plan import PreprocessingPlan
from fused_kv_llm.report import IngestReport

__all__ = ["preprocess_asked"]


def preprocess_asked(engine: FusedKVEngine, corpus: Iterable[str], asked: Iterable[str]) -> int:
    """Store the context shifts of the asked chunks that have none yet; their plain KV is stored already.

    Parameters
    ----------
    engine : FusedKVEngine
        With the default preprocessing.
    corpus : iterable of str
        All texts, the asked ones among them.
    asked : iterable of str

    Returns
    -------
    int
        Chunks that got a shift.

    Raises
    ------
    ValueError
        If a text that is asked about is not in the corpus, or the engine preprocesses in another way.
    """
    if engine.config.preprocessing != DEFAULT_PREPROCESSING:
        msg = f"preprocessing={engine.config.preprocessing!r} needs the whole corpus: ask with --corpus all"
        raise ValueError(msg)
    parts, preprocessor = engine._parts, engine.corpus._preprocessor
    name, planner = parts.shift_name, preprocessor._planner
    plan = _plan_of(engine, planner.plan(corpus, IngestReport())[0])
    keys = {chunk.key for chunk in planner.plan(asked, IngestReport())[0]}
    if strangers := keys - plan.token_ids.keys():
        msg = f"{len(strangers)} of {len(keys)} chunks that are asked about are not in the corpus"
        raise ValueError(msg)
    wanted = {key for key in keys if not engine.store.sidecars.has(key, name)}
    owner, count = engine.corpus._owner, 0
    prefill = ContextPrefill(parts.loaded, parts.store, parts.prefix, owner, plan.token_ids, _never)
    for group in preprocessor.shift_prefill(plan, owner, _never).run(plan, prefill.plain, _never, wanted):
        for chunk, fit in group:
            engine.store.sidecars.put(chunk.key, name, fit.compressed(), by_rows=True)
        count += len(group)
        print(f"preprocessed {count} of {len(wanted)} asked chunks", flush=True)
    return count


def _plan_of(engine: FusedKVEngine, chunks: Sequence[PendingChunk]) -> PreprocessingPlan:
    """Plan all chunks as the second pass plans a corpus of which nothing is preprocessed."""
    config, known = engine.config, {chunk.key: chunk for chunk in sorted(chunks, key=lambda chunk: chunk.key)}
    index = NeighbourIndex(config.neighbours)
    folder, embedder = engine.store.kv_dir, as_embedder(config.embedder)
    index.update(
        list(known), lambda keys: corpus_vectors([known[key].text for key in keys], embedder, folder / VECTORS_FILE)
    )
    plan = PreprocessingPlan(token_ids={key: chunk.token_ids for key, chunk in known.items()})
    contexts_of = engine.corpus._preprocessor._plans._contexts
    for key, chunk in known.items():
        if contexts := contexts_of(key, index.near(key).keys, plan.token_ids):
            plan.chunks.append(PendingChunk(key, chunk.text, chunk.token_ids, contexts))
    return plan


def _never() -> bool:
    return False
