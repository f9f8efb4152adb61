"""Ingestion on a Ray cluster: what one engine does in two passes, spread over actors, into a store that they share.

The driver reads, plans and counts, and needs no model: it keeps the index of the shared store, the vectors and the
neighbours in a folder of its own. The actors compute batches that the driver has put together as one process would, so
the same texts give the same bytes. A batch is the unit of retrying: it is computed again from its beginning, and what
is stored already is not stored twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fused_kv_llm.chunk import chunk_text
from fused_kv_llm.config import DEFAULT_MODEL, EngineConfig
from fused_kv_llm.engine import similarity_of
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.offline import BATCH_TOKENS, VECTORS_FILE
from fused_kv_llm.prompt import is_indexable
from fused_kv_llm.store import KVStore

from .actor_pool import ActorPool
from .corpus_reader import read_corpus
from .embedding import embed_corpus
from .first_pass import FirstPass
from .prefill_actor import CorpusFacts, PrefillActor
from .reports import DistributedIngestReport
from .resources import ActorResources, running_ray
from .second_pass import SecondPass

__all__ = ["build_kv_cache_distributed"]

_DRIVER_OPTIONS = ("kv_dir", "remote", "model")


def build_kv_cache_distributed(
    corpus: Any,
    model: str | Path = DEFAULT_MODEL,
    store_url: str | None = None,
    *,
    actors: ActorResources | None = None,
    address: str | None = None,
    kv_dir: str | Path = "./kv",
    store_options: Mapping[str, Any] | None = None,
    preprocess: Literal["wait", "later"] = "wait",
    refresh: bool = False,
    prune: bool = False,
    chunk_chars: int = 1000,
    text_column: str = "text",
    progress: bool = True,
    **options: Any,
) -> DistributedIngestReport:
    """Prefill every chunk of a corpus on a Ray cluster and store its KV where many machines find it.

    Calling it again goes on where it was interrupted, and does nothing that is done. An actor that dies is replaced,
    and its batch computed again.

    Parameters
    ----------
    corpus : Path, iterable of Path, iterable of str, or ray.data.Dataset
        What to ingest, see :func:`fused_kv_llm.scale.corpus_reader.read_corpus`.
    model : str or Path
        Alias, hub id, folder or GGUF file that every worker can load; not a model in memory.
    store_url : str
        The shared store: ``s3://bucket/prefix``, ``redis://host:6379/0``, ``file:///mnt/share``, or what else fsspec
        reaches.
    actors : ActorResources or None
        How many actors there are and what each takes; by default one a core.
    address : str or None
        Of the Ray cluster; by default this process's, ``RAY_ADDRESS``, or one that is started on this machine.
    kv_dir : str or Path
        A folder on the local disk of every node: the local tier of the shared store. The driver's also keeps vectors
        and neighbours, so give the same one again.
    store_options : mapping or None
        Further arguments of the shared store's backend, such as ``{"endpoint_url": ...}``.
    preprocess : {"wait", "later"}
        Whether the second pass is done before this returns, or not now.
    refresh : bool
        Whether chunks whose neighbours have changed are preprocessed again.
    prune : bool
        Whether chunks of the same model and tenant that are not in this corpus are deleted from the shared store. Other
        machines drop them at their next ``KVStore.shared.refresh()``.
    chunk_chars : int
        Longest chunk of a file that is split, in characters.
    text_column : str
        The column of a data set with the texts, or the field of the objects in a ``.jsonl`` file.
    progress : bool
        Whether to show a bar for each pass.
    **options
        Further options of :class:`~fused_kv_llm.config.EngineConfig`, such as ``preprocessing`` and ``tenant``.

    Returns
    -------
    DistributedIngestReport

    Raises
    ------
    ConfigError
        If an option cannot work.
    CorpusError
        If there is nothing to ingest, or a file cannot be read.
    MissingExtraError
        If a package is not installed (extra ``ray``).
    IngestionFailedError
        If a batch failed several times. What was stored stays.
    StoreError, ModelError
        As an engine does.
    """
    settings = _settings(model, store_url, kv_dir, preprocess, options)
    config = EngineConfig(**settings)
    resources, backend = actors or ActorResources(), dict(store_options or {})
    with running_ray(address) as ray:
        count = resources.fitting(ray.cluster_resources())
        report = DistributedIngestReport(actors=count)
        started = time.perf_counter()
        texts = read_corpus(corpus, chunk_chars=chunk_chars, text_column=text_column)
        similarity = None if preprocess == "later" else similarity_of(config)
        if similarity is not None:
            path = Path(config.kv_dir) / VECTORS_FILE
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            distinct = list(dict.fromkeys(text for text in map(chunk_text, texts) if is_indexable(text)))
            embed_corpus(distinct, config.embedder, path, tenant=config.tenant, workers=count, progress=progress)
        with _pool(ray, settings, backend, resources, count) as pool, _open(config, backend) as store:
            facts = pool.facts()
            report.dtype, report.kv_dtype = facts.dtype, facts.kv_dtype
            store.namespaces.add(facts.identity)
            store.describe(facts.identity.digest, facts.about)
            first = FirstPass(pool, store, facts, config.batch_tokens or BATCH_TOKENS)
            kept = first.run(texts, report, progress=progress)
            if prune:
                report.chunks_deleted = first.prune(kept)
            report.seconds = time.perf_counter() - started
            if similarity is not None:
                SecondPass(pool, store, facts, similarity, config.batch_tokens).run(
                    report, refresh=refresh, progress=progress
                )
            report.actors_replaced, report.batches_retried = pool.replaced, pool.retried
    return report


def _settings(
    model: Any, store_url: Any, kv_dir: str | Path, preprocess: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of an actor's engine, checked as far as they are this module's business."""
    if store_url is None:
        raise ConfigError(
            "store_url=None: name the store that all workers write to, such as s3://bucket/prefix, redis://host:6379/0 "
            "or file:///mnt/share (--remote on the command line)"
        )
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a name or path that every worker can load, not a model in memory"
        )
    if preprocess not in ("wait", "later"):
        raise ConfigError(f"preprocess={preprocess!r} is unknown: use 'wait' or 'later'")
    wrong = [name for name in _DRIVER_OPTIONS if name in options]
    if wrong:
        raise ConfigError(f"{wrong[0]} was given twice")
    # Workers run elsewhere: a relative path would be another folder there.
    folder = Path(kv_dir).expanduser().absolute()
    common = {"memory_bytes": 0, "batch_tokens": BATCH_TOKENS}
    return {**common, **options, "model": model, "kv_dir": folder, "remote": store_url}


@contextmanager
def _pool(
    ray: Any, settings: dict[str, Any], backend: dict[str, Any], resources: ActorResources, count: int
) -> Iterator[ActorPool[CorpusFacts]]:
    """Yield the actors, and end them with the block."""
    kind = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=0, max_task_retries=0)(
        PrefillActor
    )
    given = ray.put(settings)
    pool: ActorPool[CorpusFacts] = ActorPool(lambda: kind.remote(given, backend), count)
    try:
        yield pool
    finally:
        pool.close()


def _open(config: EngineConfig, backend: dict[str, Any]) -> KVStore:
    return KVStore(
        config.kv_dir,
        memory_bytes=0,
        disk_bytes=config.disk_bytes,
        policy=config.policy,
        kv_dtype=config.kv_dtype,
        remote=config.remote,
        remote_options=backend,
    )
