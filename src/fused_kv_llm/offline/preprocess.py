"""Ingestion: prefill chunks after the prompt's header and store their KV.

FusionRAG's offline stage without neighbours: ``KV(chunk | header)``. Chunks that are prefilled after the rendered
chat header see the model's real first tokens, which measured closer to full prefill than chunks with nothing
before them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from fused_kv_kernels import RowPlan
from fused_kv_llm.chunk import ChunkKV, chunk_key
from fused_kv_llm.errors import CorpusError, FusedKVWarning, PromptError, StoreFullError
from fused_kv_llm.model import BatchCache, KVPass, LoadedModel, PrefixKV, forward_kv
from fused_kv_llm.prompt import content_hash, is_indexable
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import KVStore

from .batches import PendingChunk, length_sorted_batches
from .progress import Advance, ingestion_progress
from .writer import BackgroundWriter

__all__ = ["BATCH_TOKENS", "Ingestor"]

BATCH_TOKENS = 2048
_SPARE_DISK_BYTES = 64 * 2**20


class Ingestor:
    """Prefills chunks of one identity into one store.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    identity : str
        Digest of everything the KV depends on.
    prefix : PrefixKV
        What stands before every chunk.
    encode : callable
        Text to stand-alone token ids.
    lock : context manager
        Held during a batch's forward, so that requests run between batches.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        identity: str,
        prefix: PrefixKV,
        encode: Callable[[str], list[int]],
        lock: AbstractContextManager[object],
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._identity = identity
        self._prefix = prefix
        self._encode = encode
        self._lock = lock

    def key_of(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Return the key and the stand-alone ids of a chunk's text; surrounding white space does not count."""
        token_ids = tuple(self._encode(text.strip()))
        return chunk_key(self._identity, token_ids), token_ids

    def run(self, texts: Iterable[str], *, progress: bool = True) -> IngestReport:
        """Prefill and store every text that is not stored yet.

        Parameters
        ----------
        texts : iterable of str
            One chunk each.
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
        pending = self._plan(texts, report)
        self._check_space(pending)
        total_tokens = sum(len(chunk.token_ids) for chunk in pending)
        with ingestion_progress(len(pending), total_tokens, enabled=progress) as advance:
            self._prefill_all(pending, report, advance)
        report.seconds = time.perf_counter() - started
        return report

    def _plan(self, texts: Iterable[str], report: IngestReport) -> list[PendingChunk]:
        distinct: dict[str, None] = {}
        for text in texts:
            if not isinstance(text, str):
                raise CorpusError(f"A chunk is of type {type(text).__name__}, not text: pass strings or documents.")
            report.chunks_total += 1
            stripped = text.strip()
            if not is_indexable(stripped):
                report.chunks_skipped += 1
            elif stripped in distinct:
                report.chunks_duplicate += 1
            else:
                distinct[stripped] = None
        if report.chunks_total == 0:
            raise CorpusError("There are no chunks to ingest: the corpus is empty.")
        chunks: dict[str, PendingChunk] = {}
        for text in distinct:
            try:
                key, token_ids = self.key_of(text)
            except PromptError as error:
                report.chunks_skipped += 1
                warnings.warn(f"A chunk is skipped: {error} {text[:60]!r}...", FusedKVWarning, stacklevel=4)
            else:
                # Two texts can have the same token ids, for instance under a normalising tokenizer.
                report.chunks_duplicate += key in chunks
                chunks[key] = PendingChunk(key, text, token_ids)
        stored = self._store.contains(chunks)
        report.chunks_present = len(stored)
        return self._drop_too_long([c for c in chunks.values() if c.key not in stored], report)

    def _drop_too_long(self, chunks: list[PendingChunk], report: IngestReport) -> list[PendingChunk]:
        limit = self._loaded.geometry.context_length - len(self._prefix.token_ids)
        fitting = [chunk for chunk in chunks if len(chunk.token_ids) < limit]
        for chunk in chunks:
            if len(chunk.token_ids) >= limit:
                report.chunks_skipped += 1
                warnings.warn(
                    f"A chunk of {len(chunk.token_ids)} tokens does not fit in the model's context of "
                    f"{self._loaded.geometry.context_length} and is skipped; split it: {chunk.text[:60]!r}...",
                    FusedKVWarning,
                    stacklevel=4,
                )
        return fitting

    def _check_space(self, pending: Sequence[PendingChunk]) -> None:
        per_token = self._loaded.geometry.kv_bytes_per_token(self._loaded.dtype)
        needed = per_token * sum(len(chunk.token_ids) for chunk in pending)
        free = self._store.free_bytes()
        if needed and needed + _SPARE_DISK_BYTES > free:
            raise StoreFullError(
                f"The KV of {len(pending)} chunks takes {needed / 1e9:.2f} GB ({per_token} bytes a token), but only "
                f"{free / 1e9:.2f} GB are free. Nothing was written: free some space, or ingest fewer chunks."
            )

    def _prefill_all(self, pending: Sequence[PendingChunk], report: IngestReport, advance: Advance) -> None:
        def written(chunk: PendingChunk, nbytes: int) -> None:
            report.chunks_new += 1
            report.tokens += len(chunk.token_ids)
            report.bytes_written += nbytes
            advance(len(chunk.token_ids), nbytes)

        if not pending:
            return
        writer = BackgroundWriter(self._write, written)
        try:
            for batch in length_sorted_batches(pending, BATCH_TOKENS):
                cache = self._prefill(batch)
                for row, chunk in enumerate(batch):
                    writer.submit(chunk, _copy_out(cache, row, chunk, len(self._prefix.token_ids)))
        finally:
            # Also after Ctrl-C: what has been computed is written, so the next run goes on from there.
            writer.close()

    def _prefill(self, batch: Sequence[PendingChunk]) -> BatchCache:
        loaded, before = self._loaded, len(self._prefix.token_ids)
        longest = max(len(chunk.token_ids) for chunk in batch)
        # Padding stands after a chunk's tokens, where causal attention keeps it from being seen.
        ids = torch.zeros((len(batch), longest), dtype=torch.int64)
        for row, chunk in enumerate(batch):
            ids[row, : len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
        positions = torch.arange(before, before + longest, device=loaded.device)
        cache = BatchCache(self._prefix.keys, self._prefix.values)
        with self._lock, torch.inference_mode():
            state = KVPass(RowPlan(positions, before + longest), loaded.geometry.num_layers - 1)
            forward_kv(loaded, ids.to(loaded.device), positions, cache, state)
        return cache

    def _write(self, chunk: PendingChunk, kv: ChunkKV) -> int:
        return self._store.put(chunk.key, self._identity, chunk.text, content_hash(chunk.text), kv)


def _copy_out(cache: BatchCache, row: int, chunk: PendingChunk, position: int) -> Callable[[], ChunkKV]:
    def copy() -> ChunkKV:
        with torch.inference_mode():
            keys, values = cache.chunk(row, len(chunk.token_ids))
        return ChunkKV(keys.cpu(), values.cpu(), chunk.token_ids, position)

    return copy
