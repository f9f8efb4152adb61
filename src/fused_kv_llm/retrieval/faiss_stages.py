"""faiss indexes searched in stages: IVF cluster by cluster, HNSW with a growing candidate list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import ConfigError, MissingExtraError

__all__ = ["FaissStages"]

_Found = tuple[NDArray[np.float32], NDArray[np.int64]]


class FaissStages:
    """Searches a faiss index in stages; the last stage's result is that of ``index.search``.

    An IVF index is searched in the clusters nearest to the query first, and what further clusters have is merged in:
    altogether no cluster is searched twice. An HNSW graph is searched anew with a larger candidate list, which costs
    as much again as the smaller ones took: about the whole search once more with lists that double. Other indexes have
    one stage.

    Parameters
    ----------
    index : faiss.Index
        Its ``nprobe`` or ``hnsw.efSearch`` is what the last stage searches. A change of it counts for later searches.
    stages : int
        How many; each searches twice as much as the one before, all together.

    Raises
    ------
    ConfigError
        If `stages` is not positive, or it is no faiss index.
    MissingExtraError
        If faiss is not installed.

    Notes
    -----
    Neighbours at equal distances may come in another order than from ``index.search``.

    Examples
    --------
    >>> import faiss, numpy as np
    >>> vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype("float32")
    >>> index = faiss.index_factory(16, "IVF32,Flat")
    >>> index.train(vectors); index.add(vectors); index.nprobe = 16
    >>> found = list(FaissStages(index, stages=3).search(vectors[0], 4))
    >>> len(found), bool((found[-1][1] == index.search(vectors[:1], 4)[1][0]).all())
    (3, True)
    """

    def __init__(self, index: Any, stages: int = 4) -> None:
        faiss = _faiss()
        if not isinstance(stages, int) or stages < 1:
            raise ConfigError(f"stages={stages!r} is not a positive number of stages")
        if not isinstance(index, faiss.Index):
            raise ConfigError(f"A {type(index).__name__} is no faiss index: give the index itself, such as store.index")
        # The concrete class of what faiss.read_index gives out as the base class; it does not own the index.
        self._owner, self._index, self._stages = index, faiss.downcast_index(index), stages

    def search(self, vector: NDArray[np.float32] | Sequence[float], k: int) -> Iterator[_Found]:
        """Yield what has been found after every stage, nearest first.

        Parameters
        ----------
        vector : array_like
            ``[D]`` or ``[1, D]``, the query.
        k : int
            Neighbours wanted.

        Yields
        ------
        distances : numpy.ndarray
            float32 ``[k]``, as ``index.search`` gives them.
        ids : numpy.ndarray
            int64 ``[k]``; -1 where fewer have been found.

        Raises
        ------
        ConfigError
            If the vector has another length than the index's.
        """
        faiss, index = _faiss(), self._index
        query = np.asarray(vector, np.float32).reshape(1, -1)
        if query.shape[1] != index.d:
            raise ConfigError(f"The query has {query.shape[1]} dimensions, the index {index.d}: use the same embedder")
        if isinstance(index, faiss.IndexIVF):
            yield from self._clusters(query, k)
        elif isinstance(index, faiss.IndexHNSW):
            for most in _growing(index.hnsw.efSearch, self._stages, least=k):
                distances, ids = index.search(query, k, params=faiss.SearchParametersHNSW(efSearch=most))
                yield distances[0], ids[0]
        else:
            distances, ids = index.search(query, k)
            yield distances[0], ids[0]

    def _clusters(self, query: NDArray[np.float32], k: int) -> Iterator[_Found]:
        faiss, index = _faiss(), self._index
        nprobe = min(index.nprobe, index.nlist)
        near, clusters = index.quantizer.search(query, nprobe)
        largest_first = index.metric_type == faiss.METRIC_INNER_PRODUCT
        distances, ids, begun = np.empty(0, np.float32), np.empty(0, np.int64), 0
        for stop in _growing(nprobe, self._stages):
            more, others = _in_clusters(index, query, k, clusters[:, begun:stop].copy(), near[:, begun:stop].copy())
            found = np.concatenate((distances, more)), np.concatenate((ids, others))
            distances, ids = _nearest(*found, k, largest_first=largest_first)
            begun = stop
            yield distances, ids


def _in_clusters(
    index: Any, query: NDArray[np.float32], k: int, clusters: NDArray[np.int64], near: NDArray[np.float32]
) -> _Found:
    """Search some clusters only.

    faiss's own wrapper takes their number from the index, which other threads search at the same time.
    """
    faiss = _faiss()
    distances, ids = np.empty(k, np.float32), np.empty(k, np.int64)
    pointers = [faiss.swig_ptr(array) for array in (clusters, near, distances, ids)]
    params = faiss.SearchParametersIVF(nprobe=clusters.shape[1])
    index.search_preassigned_c(1, faiss.swig_ptr(query), k, *pointers, False, params)
    return distances, ids


def _nearest(distances: NDArray[np.float32], ids: NDArray[np.int64], k: int, *, largest_first: bool) -> _Found:
    """Return the `k` nearest, those that are none last."""
    key = np.where(ids < 0, np.inf, -distances if largest_first else distances)
    order = np.argsort(key, kind="stable")[:k]
    return distances[order], ids[order]


def _growing(most: int, stages: int, least: int = 1) -> list[int]:
    """Return ascending numbers that about double, the last one `most`."""
    halves = [most // 2**number for number in range(stages)]
    return sorted({max(min(least, most), half) for half in halves})


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "similar") from error
    return faiss
