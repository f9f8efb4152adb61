"""Neighbours over a whole corpus: the vectors in shards, each searched by a Ray task, and the best of all merged."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.offline import nearest

from .resources import import_ray

__all__ = ["ShardedSearch"]

_SHARD_VECTORS = 200_000
_QUERIES_AT_ONCE = 8192

_Found = tuple[NDArray[np.float32], NDArray[np.int64]]


class ShardedSearch:
    """Searches as :func:`fused_kv_llm.offline.nearest` does, by tasks all over a Ray cluster.

    The search is exact. Every shard returns as many vectors as are wanted in all, so that the best of the shards are
    the best of the whole.

    Parameters
    ----------
    shard_vectors : int
        Vectors of a shard, which one task searches.
    """

    def __init__(self, shard_vectors: int = _SHARD_VECTORS) -> None:
        self._shard_vectors = shard_vectors

    def __call__(self, vectors: NDArray[np.float32], queries: NDArray[np.float32], count: int) -> _Found:
        """Return the similarities of the `count` vectors nearest to each query, and their rows; the nearest first.

        Raises
        ------
        MissingExtraError
            If Ray is not installed, or faiss is not on a worker.
        """
        ray = import_ray()
        # The actors with the model hold the cores, and wait for this.
        task = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_search)
        starts = range(0, len(vectors), self._shard_vectors)
        shards = [ray.put(vectors[start : start + self._shard_vectors]) for start in starts]
        found = []
        for at in range(0, len(queries), _QUERIES_AT_ONCE):
            block = ray.put(queries[at : at + _QUERIES_AT_ONCE])
            parts = ray.get([task.remote(shard, block, count) for shard in shards])
            pairs = zip(parts, starts, strict=True)
            found.append(_best([(similarity, rows + start) for (similarity, rows), start in pairs], count))
        return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])


def _search(vectors: Any, queries: Any, count: int) -> _Found:
    # faiss wants arrays that it could write to; those of the object store are read-only.
    return nearest(np.array(vectors), np.array(queries), min(count, len(vectors)))


def _best(parts: list[_Found], count: int) -> _Found:
    similarity = np.concatenate([part[0] for part in parts], axis=1)
    rows = np.concatenate([part[1] for part in parts], axis=1)
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(similarity, order, axis=1), np.take_along_axis(rows, order, axis=1)
