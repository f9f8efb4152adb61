"""Ingestion: prefill chunks and store their KV.

A chunk's KV is ``KV(chunk | header)``, prefilled after the rendered chat header. FusionRAG's offline stage (section
3.1, equation 10) prefills it once more, after the KV of the chunks most similar to it. Here that is done after several
contexts of similar chunks, and what they change on average is stored beside it (:mod:`fused_kv_llm.context_shift`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import CONTEXT_SHIFT, context_shift
from fused_kv_llm.errors import ConfigError, StoreFullError
from fused_kv_llm.model import LoadedModel, PackedChunk, PrefixKV, prefill_packed
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import KVStore, stored_bytes_per_token

from .batches import PendingChunk, batches, walk_neighbours
from .corpus import CorpusPlanner
from .neighbours import GivenNeighbours
from .plain_kv import PlainKVCache
from .progress import Advance, ingestion_progress
from .writer import BackgroundWriter

__all__ = ["BATCH_TOKENS", "Ingestor"]

BATCH_TOKENS = 2048
_SPARE_DISK_BYTES = 64 * 2**20
_PLAIN_KV_BYTES = 2**30


class Ingestor:
    """Prefills chunks of one identity into one store.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    identity : str
        Digest of everything the KV depends on, but the chunk and its neighbours.
    prefix : PrefixKV
        What stands before every chunk.
    planner : CorpusPlanner
        Says what has to be prefilled, and after which neighbours.
    lock : context manager
        Held during a batch's forward, so that requests run between batches.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        identity: str,
        prefix: PrefixKV,
        planner: CorpusPlanner,
        lock: AbstractContextManager[object],
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._identity = identity
        self._prefix = prefix
        self._planner = planner
        self._lock = lock

    def run(
        self,
        texts: Iterable[str],
        *,
        neighbours: GivenNeighbours | None = None,
        refresh: bool = False,
        check_stale: bool = True,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill and store every text that is not stored yet.

        Parameters
        ----------
        texts : iterable of str
            One chunk each.
        neighbours : mapping, callable or None
            A caller's own graph of similar chunks; None asks the embedder.
        refresh : bool
            Whether stored chunks whose neighbours have changed are prefilled again.
        check_stale : bool
            Whether to look for such chunks at all.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there are no texts, or something that is not text.
        StoreFullError
            Before anything is computed if the disk cannot hold the result, or while writing. What was
            written stays, and running again resumes.
        """
        started = time.perf_counter()
        report = IngestReport()
        pending = self._planner.plan(texts, report, neighbours, refresh, check_stale)
        self._check_space(pending)
        total_tokens = sum(len(chunk.token_ids) for chunk in pending)
        with ingestion_progress(len(pending), total_tokens, enabled=progress) as advance:
            self._prefill_all(pending, report, advance)
        report.seconds = time.perf_counter() - started
        return report

    def _check_space(self, pending: Sequence[PendingChunk]) -> None:
        geometry = self._loaded.geometry
        shape = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        storage = str(self._loaded.dtype).removeprefix("torch.") if self._store.kv_dtype == "auto" else None
        per_token = stored_bytes_per_token(storage or self._store.kv_dtype, *shape)
        needed = per_token * sum(len(chunk.token_ids) for chunk in pending)
        # Context shifts are stored in eight bits.
        shifted = sum(len(chunk.token_ids) for chunk in pending if chunk.contexts)
        needed += stored_bytes_per_token("int8", *shape) * shifted
        free = self._store.free_bytes(_SPARE_DISK_BYTES)
        if needed > free:
            raise StoreFullError(
                f"The KV of {len(pending)} chunks takes {needed / 1e9:.2f} GB ({per_token} bytes a token), but only "
                f"{free / 1e9:.2f} GB are free. Nothing was written: free some space, raise disk_bytes or give the "
                "store a remote tier, or ingest fewer chunks."
            )

    def _prefill_all(self, pending: Sequence[PendingChunk], report: IngestReport, advance: Advance) -> None:
        def written(chunk: PendingChunk, nbytes: int) -> None:
            if chunk.replaces:
                # Only now: until the new KV is there, the old one serves.
                self._store.delete(chunk.replaces)
                report.chunks_refreshed += 1
            else:
                report.chunks_new += 1
            report.tokens += len(chunk.token_ids)
            report.bytes_written += nbytes
            advance(len(chunk.token_ids), nbytes)

        def prefill_plain(texts: Sequence[str]) -> list[ChunkKV]:
            found: list[ChunkKV] = []
            chunks = [PendingChunk("", text, ids_of[text]) for text in texts]
            for batch in batches(chunks, BATCH_TOKENS, {}, 0):
                found += self._prefill([PackedChunk(chunk.token_ids) for chunk in batch])
            report.neighbour_tokens += sum(len(ids_of[text]) for text in texts if text not in own)
            return found

        if not pending:
            return
        own = {chunk.text: chunk.token_ids for chunk in pending}
        others = {text for chunk in pending for text in chunk.neighbours} - own.keys()
        ids_of = {**own, **self._planner.ids_of(others)}
        num_tokens = {text: len(ids) for text, ids in ids_of.items()}
        budget_tokens = _PLAIN_KV_BYTES // self._loaded.geometry.kv_bytes_per_token(self._loaded.dtype)
        plain = PlainKVCache(prefill_plain, _PLAIN_KV_BYTES if any(chunk.contexts for chunk in pending) else 0)
        writer = BackgroundWriter(self._write, written)
        try:
            for batch in batches(walk_neighbours(pending), BATCH_TOKENS, num_tokens, budget_tokens):
                at_hand = plain.get(text for chunk in batch for text in (chunk.text, *chunk.neighbours))
                for chunk, shift in zip(batch, self._shifts(batch, at_hand), strict=True):
                    writer.submit(chunk, at_hand[chunk.text], shift)
        finally:
            # Also after Ctrl-C: what has been computed is written, so the next run goes on from there.
            writer.close()

    def _shifts(
        self, batch: Sequence[PendingChunk], plain: Mapping[str, ChunkKV]
    ) -> Iterator[dict[str, Tensor] | None]:
        """Yield what its neighbours change in each chunk; None for a chunk without."""
        shifted: dict[str, list[ChunkKV]] = {chunk.text: [] for chunk in batch}
        for turn in range(max(len(chunk.contexts) for chunk in batch)):
            ready = [chunk for chunk in batch if turn < len(chunk.contexts)]
            contexts = [tuple(plain[text] for text in chunk.contexts[turn]) for chunk in ready]
            packed = [PackedChunk(chunk.token_ids, context) for chunk, context in zip(ready, contexts, strict=True)]
            for chunk, kv in zip(ready, self._prefill(packed), strict=True):
                shifted[chunk.text].append(kv)
        for chunk in batch:
            before, after = plain[chunk.text], shifted.pop(chunk.text)
            with torch.inference_mode():
                forms = [(kv.keys, kv.values) for kv in after]
                yield context_shift((before.keys, before.values), forms) if forms else None

    def _prefill(self, chunks: Sequence[PackedChunk]) -> list[ChunkKV]:
        with self._lock:
            return prefill_packed(self._loaded, chunks, self._prefix)

    def _write(self, chunk: PendingChunk, kv: ChunkKV, shift: dict[str, Tensor] | None) -> int:
        on_cpu = ChunkKV(kv.keys.cpu(), kv.values.cpu(), kv.token_ids, kv.position)
        nbytes = self._store.put(chunk.key, self._identity, chunk.text, content_hash(chunk.text), on_cpu)
        if shift is not None:
            try:
                nbytes += self._store.sidecars.put(chunk.key, CONTEXT_SHIFT, shift, by_rows=True)
            except ConfigError:
                # Otherwise the chunk was evicted, by another process that needed its room.
                if self._store.contains([chunk.key]):
                    raise
        return nbytes
