"""Embedding a corpus by Ray Data's workers; the vectors are remembered beside the driver's store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fused_kv_llm.offline import (
    TEXTS_AT_ONCE,
    Embedder,
    PassCounts,
    as_embedder,
    keep_vectors,
    progress_bar,
    unknown_texts,
)

from .resources import import_ray, rows_of

__all__ = ["embed_corpus"]

_MOST_BLOCKS = 1000
# Vectors are remembered by so many texts at a time.
_TEXTS_KEPT_AT_ONCE = 1024


def embed_corpus(texts: Sequence[str], embedder: Any, path: Path, *, tenant: str, workers: int, progress: bool) -> int:
    """Embed the texts whose vectors are not remembered, and remember them.

    Texts are embedded in the same small groups as in one process, since a text's vector can differ in its last digits
    with those beside it.

    Parameters
    ----------
    texts : sequence of str
        Distinct.
    embedder : object or None
        As :func:`fused_kv_llm.offline.as_embedder` takes it; it has to be one that can be pickled.
    path : Path
        Where vectors are remembered.
    tenant : str
    workers : int
        Processes that embed.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    int
        Texts that were embedded.
    """
    known = as_embedder(embedder)
    missing = unknown_texts(texts, known, path, tenant=tenant)
    if not missing:
        return 0
    ray = import_ray()
    rows = [{"texts": missing[at : at + TEXTS_AT_ONCE]} for at in range(0, len(missing), TEXTS_AT_ONCE)]
    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MOST_BLOCKS)).map_batches(
        _EmbeddingWorker,
        fn_constructor_args=None if embedder is None else (embedder,),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=max(1, min(workers, len(rows)))),
        num_cpus=1,
    )
    dataset.set_name("fused-kv-embed")
    counts = PassCounts(len(missing), sum(map(len, missing)), unit="characters")
    with progress_bar("Embedding chunks", counts, enabled=progress) as show:
        waiting = list[tuple[list[str], Any]]()
        for row in rows_of(dataset, "Embedding"):
            waiting.append((list(row["texts"]), np.stack([np.asarray(one, np.float32) for one in row["vectors"]])))
            if sum(len(group) for group, _ in waiting) >= _TEXTS_KEPT_AT_ONCE:
                _keep(waiting, known, path, tenant, counts)
                show()
        _keep(waiting, known, path, tenant, counts)
        show()
    return len(missing)


def _keep(
    waiting: list[tuple[list[str], Any]], embedder: Embedder, path: Path, tenant: str, counts: PassCounts
) -> None:
    if waiting:
        texts = [text for group, _ in waiting for text in group]
        keep_vectors(texts, np.concatenate([vectors for _, vectors in waiting]), embedder, path, tenant=tenant)
        for text in texts:
            counts.add(len(text), 0)
        waiting.clear()


class _EmbeddingWorker:
    """Holds the embedder in a process of Ray's."""

    def __init__(self, embedder: Any = None) -> None:
        self._embedder = as_embedder(embedder)

    def __call__(self, batch: Any) -> Any:
        """Return the rows of a batch with the vectors of their texts."""
        import pyarrow as pa

        rows = batch.to_pylist()
        return pa.Table.from_pylist(
            [{"texts": row["texts"], "vectors": self._embedder.encode(row["texts"]).tolist()} for row in rows],
            schema=pa.schema([("texts", pa.list_(pa.string())), ("vectors", pa.list_(pa.list_(pa.float32())))]),
        )
