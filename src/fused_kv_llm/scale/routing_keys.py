"""What a request's body says about where it should go: the stored chunks in its text, and its conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.prompt import ContentIndex

from .chunk_names import chunk_name, conversation_names
from .placement import Part, RoutingKey

__all__ = ["RoutingKeys", "StoredHashes"]

# Longer texts are keyed by their beginning: this only costs time where it is wrong.
_MOST_CHARS = 1_000_000

StoredHashes = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]
"""Hashes of the beginnings and of the whole texts of chunks, and their lengths in characters."""


class RoutingKeys:
    """Makes routing keys; thread-safe.

    It has the hashes of the stored chunks' texts, 28 bytes a chunk and no text. So a chunk is recognised wherever it
    stands in a prompt, and whatever stands around it, before a replica has rendered or tokenised anything.
    """

    def __init__(self) -> None:
        self._index = ContentIndex()

    def __len__(self) -> int:
        """Chunks that are known, with those that two replicas have told of and that were not merged yet."""
        return len(self._index)

    def add(self, hashes: StoredHashes) -> None:
        """Learn of stored chunks; those that are known already are kept once."""
        prefix, full, length = hashes
        # Chunks are called by their hash here, so that equal texts of several replicas are one.
        self._index.add(np.asarray(full, np.uint64).view(np.int64), prefix, full, length)

    def key_of(self, request: Mapping[str, Any], tenant: str) -> RoutingKey:
        """Return the key of a request.

        Parameters
        ----------
        request : mapping
            The body of a request for an answer. One that makes no sense has a key without parts: a replica refuses it.
        tenant : str
            What the tenant is called below the server's own, empty for that.
        """
        messages = _messages(request)
        text = "\n".join(text for _, text in messages)
        if not text:
            return RoutingKey(0)
        spans = self._index.find_alike(text[:_MOST_CHARS])
        chunks = tuple(Part(chunk_name(number % 2**64, tenant), end - start) for number, start, end in spans)
        return RoutingKey(len(text), chunks, _prefixes(messages, tenant))


def _prefixes(messages: Sequence[tuple[str, str]], tenant: str) -> tuple[Part, ...]:
    """Return the conversation up to each message, the longest first; what everybody begins with is none."""
    sizes = np.cumsum([len(text) for _, text in messages]).tolist()
    first = next((place for place, (role, _) in enumerate(messages) if role == "user"), len(messages))
    names = conversation_names(messages, tenant)
    return tuple(Part(names[place], sizes[place]) for place in range(len(messages) - 1, first - 1, -1))


def _messages(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return roles and texts; the prompts of a completion count as a user's messages."""
    given = request.get("messages")
    if isinstance(given, list):
        return [(_string(one.get("role")), _text(one.get("content"))) for one in given if isinstance(one, dict)]
    prompt = request.get("prompt")
    return [("user", text) for text in (prompt if isinstance(prompt, list) else [prompt]) if isinstance(text, str)]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_string(part.get("text")) for part in content if isinstance(part, dict))
    return _string(content)


def _string(value: Any) -> str:
    """Return a text; anything else is none, and as deep as it may be never written out."""
    return value if isinstance(value, str) else ""
