"""Spans of prefixes in a store. Whatever is wrong with it is a miss and a warning: the tokens are computed again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.errors import ChunkDamagedError, FusedKVWarning, StoreError
from fused_kv_llm.store import KVStore
from fused_kv_vllm.blocks import BlockLayout
from fused_kv_vllm.spans import PrefixSpan

__all__ = ["PrefixStore"]

# Spans have no text. Texts of an engine's chunks have at least 32 characters, so none has these hashes.
_NO_TEXT = ContentHash(prefix=0, full=0, length=0)


class PrefixStore:
    """Reads and writes spans; thread-safe.

    Parameters
    ----------
    store : KVStore
        Spans are told apart from an engine's chunks by their identity.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def known(self, spans: Sequence[PrefixSpan]) -> int:
        """Return how many spans are stored, from the first one on without a gap.

        The token ids of every one of them are compared, so nothing is taken on the word of a hash.
        """
        try:
            rows = self._store.rows(span.key for span in spans)
        except StoreError as error:
            _warn(f"The stored prefixes cannot be looked up ({error}): prompts are computed afresh.")
            return 0
        for number, span in enumerate(spans):
            row = rows.get(span.key)
            if row is None or (row.identity, row.position, row.token_ids) != (
                span.identity,
                span.start,
                span.token_ids,
            ):
                return number
        return len(spans)

    def read(self, span: PrefixSpan, layout: BlockLayout) -> tuple[Tensor, Tensor] | None:
        """Read a span's KV, verified.

        Parameters
        ----------
        span : PrefixSpan
        layout : BlockLayout
            What it has to look like.

        Returns
        -------
        tuple of Tensor, or None
            Keys and values as ``BlockCaches.gather`` returned them; not to be written to. None if it is gone or cannot
            be used, with a warning; a damaged file is taken out of the store.
        """
        wanted = (layout.layers, layout.heads, len(span.token_ids), layout.width // 2)
        try:
            stored = self._store.open(span.key, span.token_ids)
            if stored is None:
                return None
            with stored:
                header = stored.header
                found = (stored.identity, stored.position, header.shape, header.value_dim, header.storage)
                if found != (span.identity, span.start, wanted, wanted[3], layout.dtype):
                    raise ChunkDamagedError(span.key, "it is not the span of a prefix that its name says")
                return stored.read_layers(0, stored.num_layers)
        except ChunkDamagedError as error:
            self._discard(error)
        except (StoreError, OSError) as error:
            _warn(f"The stored KV of a prefix cannot be read ({error}): its tokens are computed afresh.")
        return None

    def write(self, span: PrefixSpan, keys: Tensor, values: Tensor) -> int:
        """Store a span's KV unless it is stored; returns the bytes written. A store that cannot be written warns."""
        try:
            kv = ChunkKV(keys, values, span.token_ids, span.start)
            return self._store.put(span.key, span.identity, "", _NO_TEXT, kv)
        except StoreError as error:
            _warn(f"The KV of a prefix cannot be stored ({error}): it will be computed again.")
            return 0

    def describe(self, identity: str, name: str) -> None:
        """Give an identity a readable name, if the store can be written."""
        try:
            self._store.describe(identity, name)
        except StoreError as error:
            _warn(f"The store cannot be written ({error}): prefixes are not kept.")

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _discard(self, error: ChunkDamagedError) -> None:
        try:
            self._store.discard(error.key, error.reason)
        except StoreError as failed:
            _warn(f"{error}; it cannot be taken out of the store ({failed}).")


def _warn(message: str) -> None:
    warnings.warn(message, FusedKVWarning, stacklevel=3)
