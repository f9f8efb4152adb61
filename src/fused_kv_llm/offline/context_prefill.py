"""Prefilling chunks behind contexts of other chunks, whose plain KV is read from the store or computed.

FusionRAG section 3.1, equation 10: the context's KV is taken as it is, the chunk attends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.model import LoadedModel, ModelOwner, PackedChunk, PrefixKV, prefill_packed
from fused_kv_llm.store import KVStore

from .batches import PendingChunk, batches, walk_neighbours
from .plain_kv import PlainKVCache

__all__ = ["BATCH_TOKENS", "ContextPrefill", "context_batches"]

BATCH_TOKENS = 1024
"""Most tokens of one forward."""

_PLAIN_KV_BYTES = 2**28
"""Most bytes of plain KV that stand by in memory."""


def context_batches(
    chunks: Sequence[PendingChunk],
    max_tokens: Callable[[], int],
    token_ids: Mapping[str, tuple[int, ...]],
    kv_bytes_per_token: int,
) -> Iterator[list[PendingChunk]]:
    """Divide chunks into the batches in which they are computed behind their contexts, neighbours close together.

    Parameters
    ----------
    chunks : sequence of PendingChunk
    max_tokens : callable
        Says how many tokens a batch may have, for each.
    token_ids : mapping of str to tuple of int
        As :class:`ContextPrefill` takes them.
    kv_bytes_per_token : int
    """
    num_tokens = {key: len(ids) for key, ids in token_ids.items()}
    room = _PLAIN_KV_BYTES // kv_bytes_per_token
    return batches(walk_neighbours(chunks), max_tokens, num_tokens, room)


class ContextPrefill:
    """Computes chunks behind their contexts, in small batches that give way to requests; one thread at a time.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    prefix : PrefixKV
        What stands before every chunk.
    owner : ModelOwner
        Computes the batches, between those of requests.
    token_ids : mapping of str to tuple of int
        Stand-alone ids of all chunks and of those in their contexts, by key.
    stopped : callable
        Asked before every forward.

    Attributes
    ----------
    neighbour_tokens : int
        Tokens of similar chunks that had to be prefilled, since their KV is not stored exactly.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        prefix: PrefixKV,
        owner: ModelOwner,
        token_ids: Mapping[str, tuple[int, ...]],
        stopped: Callable[[], bool],
    ) -> None:
        self._loaded, self._store, self._prefix, self._owner = loaded, store, prefix, owner
        self._token_ids, self._stopped = token_ids, stopped
        self._plain = PlainKVCache(self._plain_kv, _PLAIN_KV_BYTES)
        self.neighbour_tokens = 0

    def plain(self, keys: Iterable[str]) -> dict[str, ChunkKV]:
        """Return the KV of chunks right after the header; raises as :meth:`behind`."""
        return self._plain.get(keys)

    def behind(
        self, chunks: Sequence[PendingChunk], *, is_batch: bool = False
    ) -> Iterator[tuple[PendingChunk, ChunkKV]]:
        """Yield chunks with their KV behind their first context, neighbours close together.

        Parameters
        ----------
        chunks : sequence of PendingChunk
        is_batch : bool
            Whether they are one batch already, in their order.

        Raises
        ------
        StoppedError
            If it was stopped.
        """
        for batch in [list(chunks)] if is_batch else self._batches(chunks):
            kept = self._plain.get(key for chunk in batch for key in chunk.contexts[0])
            packed = [PackedChunk(one.token_ids, tuple(kept[key] for key in one.contexts[0])) for one in batch]
            yield from zip(batch, self._prefill(packed), strict=True)

    def _batches(self, chunks: Sequence[PendingChunk]) -> Iterator[list[PendingChunk]]:
        nbytes = self._loaded.geometry.kv_bytes_per_token(self._loaded.dtype)
        return context_batches(chunks, self._piece_tokens, self._token_ids, nbytes)

    def _plain_kv(self, keys: Sequence[str]) -> list[ChunkKV]:
        """Return plain KV: from the store where it is stored exactly, else computed."""
        found = {key: kv for key in keys if (kv := self._stored_kv(key)) is not None}
        missing = [PendingChunk(key, "", self._token_ids[key]) for key in keys if key not in found]
        for batch in batches(missing, self._piece_tokens, {}, 0):
            made = self._prefill([PackedChunk(chunk.token_ids) for chunk in batch])
            found.update(zip((chunk.key for chunk in batch), made, strict=True))
            self.neighbour_tokens += sum(len(chunk.token_ids) for chunk in batch)
        return [found[key] for key in keys]

    def _stored_kv(self, key: str) -> ChunkKV | None:
        token_ids = self._token_ids[key]
        stored = self._store.open(key, token_ids, counted=False, keeps=False)
        if stored is None:
            return None
        with stored:
            if stored.storage != str(self._loaded.dtype).removeprefix("torch."):
                return None
            try:
                keys, values = stored.read_layers(0, stored.num_layers)
            except ChunkDamagedError as error:
                self._store.discard(error.key, error.reason)
                return None
            device = self._loaded.device
            return ChunkKV(keys.to(device), values.to(device), token_ids, stored.position)

    def _prefill(self, chunks: Sequence[PackedChunk]) -> list[ChunkKV]:
        def compute() -> list[ChunkKV]:
            self._loaded.check_unchanged()
            return prefill_packed(self._loaded, chunks, self._prefix)

        return self._owner.run(compute, sum(len(chunk.token_ids) for chunk in chunks), self._stopped)

    def _piece_tokens(self) -> int:
        return self._owner.piece_tokens(BATCH_TOKENS)
