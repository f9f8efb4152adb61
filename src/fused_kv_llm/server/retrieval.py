"""Chunks of a tenant's documents by meaning: a FAISS index over them, and prompts that contain what it finds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fused_kv_llm.demo import FoundPassage, Rag
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import MissingExtraError
from fused_kv_llm.offline import Embedder

from .library import Library
from .messages import ChatMessage
from .refusals import RefusedError

__all__ = ["Retrieval", "RetrievedChunk"]


@dataclass(frozen=True, slots=True)
class RetrievedChunk(FoundPassage):
    """A chunk that was found; its source is the document's name.

    Parameters
    ----------
    document : str
        Id of its document.
    number : int
        Its number there, counted from 0.
    """

    document: str
    number: int

    def to_dict(self) -> dict[str, Any]:
        """Return what an answer says of it."""
        return {"document_id": self.document, "name": self.source, "chunk": self.number, "score": self.score}


class Retrieval:
    """Finds chunks in libraries; each has an index, which is made anew when its documents have changed. Thread-safe.

    Parameters
    ----------
    embedder : Embedder
        The one that made the chunks' vectors.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self._lock = embedder, threading.Lock()
        self._indexes: weakref.WeakKeyDictionary[Library, _Index] = weakref.WeakKeyDictionary()

    def prompt(
        self, engine: FusedKVEngine, library: Library, messages: Sequence[ChatMessage], k: int, max_tokens: int
    ) -> tuple[list[ChatMessage], list[RetrievedChunk]]:
        """Put what is found for a conversation's last message before it, as ``fused-kv ask`` does.

        Parameters
        ----------
        engine : FusedKVEngine
            Has the chunks' KV, which it begins to load.
        library : Library
        messages : sequence of ChatMessage
        k : int
            Chunks wanted; fewer are used where the model's context does not hold them.
        max_tokens : int
            Room to leave for the answer.

        Returns
        -------
        list of ChatMessage
        list of RetrievedChunk
            Best first.

        Raises
        ------
        RefusedError
            If there are no documents, no chunk fits, or the last message is no user's.
        """
        *earlier, last = messages
        if last.role != "user" or not last.text.strip():
            raise RefusedError("The last message must be the user's question to retrieve for", param="messages")
        taken = sum(len(engine.token_ids(message.text)) for message in earlier if message.text)
        index = self._index(library)
        prompt = Rag(index, engine, k=k, max_tokens=max_tokens + taken).prompt(last.text)
        if not prompt.sources:
            raise RefusedError(
                "The model's context has no room for a chunk beside this conversation and its answer: ask for fewer "
                "max_tokens, or send fewer messages",
                code="context_length_exceeded",
            )
        found = [chunk for chunk in prompt.sources if isinstance(chunk, RetrievedChunk)]
        return [*earlier, last.model_copy(update={"content": prompt.text})], found

    def _index(self, library: Library) -> _Index:
        with self._lock:
            index = self._indexes.get(library)
            if index is None or index.version != library.version or library.now_s() >= index.until_s:
                index = self._indexes[library] = _Index(library, self._embedder)
        return index


class _Index:
    """What could be retrieved from a library when it was read."""

    def __init__(self, library: Library, embedder: Embedder) -> None:
        self.version = library.version
        rows, self.until_s = library.retrievable()
        if not rows:
            raise RefusedError(
                "There are no documents to retrieve from: upload some to /v1/documents", code="no_documents"
            )
        vectors = np.stack([np.frombuffer(row[4], np.float32) for row in rows])
        # The same text may stand in several documents, but only once in a prompt.
        first = {row[3]: position for position, row in reversed(list(enumerate(rows)))}
        kept = sorted(first.values())
        self._rows, self._embedder = [rows[position] for position in kept], embedder
        self._index = _faiss().IndexFlatIP(vectors.shape[1])
        self._index.add(vectors[kept])

    def search(self, query: str, k: int) -> list[RetrievedChunk]:
        """Return the nearest chunks, best first."""
        scores, positions = self._index.search(self._embedder.encode([query]), min(k, len(self._rows)))
        return [self._chunk(i, score) for i, score in zip(positions[0], scores[0], strict=True)]

    def _chunk(self, position: int, score: float) -> RetrievedChunk:
        document, name, number, text, _ = self._rows[position]
        return RetrievedChunk(text, name, round(float(score), 4), document, number)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "server") from error
    return faiss
