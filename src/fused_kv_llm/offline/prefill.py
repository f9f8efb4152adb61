"""The first pass of ingestion: the plain KV of every chunk. A chunk can be asked about as soon as it is written.

A chunk's KV is ``KV(chunk | header)``: prefilled right after the rendered chat header, which every prompt begins with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.errors import FusedKVError, PromptError, StoreFullError
from fused_kv_llm.model import LoadedModel, ModelOwner, PackedChunk, PrefixKV, prefill_packed
from fused_kv_llm.prompt import content_hash, is_indexable
from fused_kv_llm.report import IngestReport
from fused_kv_llm.store import KVStore, stored_bytes_per_token

from .alternative_path import AlternativePath
from .batches import PendingChunk, batches
from .corpus import CorpusPlanner
from .first_passes import first_passes_of
from .neighbours import GivenNeighbours
from .prefill_cost import WORTH_MEASURING_TOKENS, PrefillCost
from .preprocess import Preprocessor
from .progress import PassCounts, progress_bar
from .writer import BackgroundWriter

__all__ = ["BATCH_TOKENS", "Ingestor"]

BATCH_TOKENS = 2048
_SPARE_DISK_BYTES = 64 * 2**20

_log = logging.getLogger(__name__)


class Ingestor:
    """Prefills chunks of one identity into one store.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    identity : str
        ``KVIdentity.digest``.
    prefix : PrefixKV
        What stands before every chunk.
    planner : CorpusPlanner
        Says which chunks are new.
    owner : ModelOwner
        Computes the batches, between those of requests.
    preprocessor : Preprocessor or None
        Does the second pass; here it is only told of a caller's neighbours.
    cost : PrefillCost
        What the store is told of a chunk; measured during the first long ingestion.

    Attributes
    ----------
    alternative : AlternativePath or None
        Where the KV of new chunks is looked for before it is computed; None computes all of it.
    first_passes : FirstPasses
        Those of this model, whoever computes them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        identity: str,
        prefix: PrefixKV,
        planner: CorpusPlanner,
        owner: ModelOwner,
        preprocessor: Preprocessor | None,
        cost: PrefillCost,
    ) -> None:
        self._loaded = loaded
        self._cost = cost
        self._store = store
        self._identity = identity
        self._prefix = prefix
        self._planner = planner
        self._owner = owner
        self._preprocessor = preprocessor
        self.alternative: AlternativePath | None = None
        self.first_passes = first_passes_of(loaded.model)

    def run(
        self, texts: Iterable[str], *, neighbours: GivenNeighbours | None = None, progress: bool = True
    ) -> IngestReport:
        """Prefill and store every text that is not stored yet.

        Parameters
        ----------
        texts : iterable of str
            One chunk each.
        neighbours : mapping, callable or None
            A caller's own graph of similar chunks, which is remembered; None leaves it to the embedder.
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
        chunks, new = self._planner.plan(texts, report)
        if self._preprocessor is not None:
            self._preprocessor.prepare(chunks, neighbours)
        self._check_space(new)
        if sum(len(chunk.token_ids) for chunk in new) >= WORTH_MEASURING_TOKENS:
            self._cost.measure(self._owner)
        rest = self._adopt_all(new, report)
        counts = PassCounts(len(rest), sum(len(chunk.token_ids) for chunk in rest))
        with progress_bar("Prefilling chunks", counts, enabled=progress) as show:
            self._prefill_all(rest, counts, show)
        report.chunks_new = report.chunks_adopted + counts.chunks
        report.tokens, report.bytes_written = counts.tokens, report.bytes_written + counts.nbytes
        report.seconds = time.perf_counter() - started
        return report

    def prefill_together(self, chunks: Sequence[PendingChunk]) -> None:
        """Compute chunks in one forward and store those that are not stored; for whoever plans the batches elsewhere.

        Raises
        ------
        StoreFullError, StoreUnavailableError
            They cannot be written.
        """
        for chunk, kv in zip(chunks, self._prefill(chunks), strict=True):
            self._write(chunk, kv)

    def adopt(self, texts: Iterable[str]) -> int:
        """Store those of several chunks whose KV answered prompts have left; nothing is computed.

        Parameters
        ----------
        texts : iterable of str
            Canonical texts that are not stored.

        Returns
        -------
        int
            How many are stored now. What cannot be stored is logged, and left to :meth:`run`.
        """
        report = IngestReport()
        for text in filter(is_indexable, texts):
            try:
                self._adopt_all([self._planner.chunk(text)], report)
            except PromptError:
                # Too long for the tokenizer, which `run` says.
                continue
            except FusedKVError as error:
                _log.warning("The KV of a chunk in an answered prompt could not be stored: %s", error)
                break
        return report.chunks_adopted

    def _adopt_all(self, new: Sequence[PendingChunk], report: IngestReport) -> list[PendingChunk]:
        """Store the chunks whose KV the alternative path finds, and return the others."""
        rest = []
        for chunk in new:
            kv = None if self.alternative is None else self.alternative.find(chunk.token_ids)
            if kv is None:
                rest.append(chunk)
            else:
                report.bytes_written += self._write(chunk, kv)
                report.chunks_adopted += 1
        return rest

    def _check_space(self, new: Sequence[PendingChunk]) -> None:
        geometry = self._loaded.geometry
        shape = geometry.num_layers, *geometry.room
        storage = str(self._loaded.dtype).removeprefix("torch.") if self._store.kv_dtype == "auto" else None
        per_token = stored_bytes_per_token(storage or self._store.kv_dtype, *shape)
        if self._preprocessor is not None:
            per_token += stored_bytes_per_token(self._preprocessor.storage, *shape)
        needed = per_token * sum(len(chunk.token_ids) for chunk in new)
        free = self._store.free_bytes(_SPARE_DISK_BYTES)
        if needed > free:
            raise StoreFullError(
                f"The KV of {len(new)} chunks takes {needed / 1e9:.2f} GB ({per_token} bytes a token), but only "
                f"{free / 1e9:.2f} GB are free. Nothing was written: free some space, raise disk_bytes or give the "
                "store a remote tier, or ingest fewer chunks."
            )

    def _prefill_all(self, new: Sequence[PendingChunk], counts: PassCounts, show: Callable[[], None]) -> None:
        def write(item: tuple[PendingChunk, ChunkKV]) -> None:
            counts.add(len(item[0].token_ids), self._write(*item))
            show()

        writer = BackgroundWriter(write)
        try:
            with self.first_passes.under_way():
                for batch in batches(new, lambda: self._owner.piece_tokens(BATCH_TOKENS), {}, 0):
                    for item in zip(batch, self._prefill(batch), strict=True):
                        writer.submit(item)
        finally:
            # Also after Ctrl-C: what has been computed is written, so the next run goes on from there.
            writer.close()

    def _write(self, chunk: PendingChunk, kv: ChunkKV) -> int:
        on_cpu = ChunkKV(kv.keys.cpu(), kv.values.cpu(), kv.token_ids, kv.position)
        cost = self._cost(len(self._prefix.token_ids), len(chunk.token_ids))
        return self._store.put(chunk.key, self._identity, chunk.text, content_hash(chunk.text), on_cpu, cost=cost)

    def _prefill(self, batch: Sequence[PendingChunk]) -> list[ChunkKV]:
        def compute() -> list[ChunkKV]:
            self._loaded.check_unchanged()
            return prefill_packed(self._loaded, [PackedChunk(chunk.token_ids) for chunk in batch], self._prefix)

        return self._owner.run(compute, sum(len(chunk.token_ids) for chunk in batch))
