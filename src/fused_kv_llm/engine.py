"""The whole algorithm on one page: plan -> load -> select -> fuse -> generate.

Everything below happens in the rooms it imports; the engine wires one model to one store and keeps requests of
several threads apart.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fused_kv_llm.calibration import read_calibration
from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity
from fused_kv_llm.config import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_NEIGHBOURS,
    DEFAULT_PREPROCESSING,
    DEFAULT_RATIO,
    DEFAULT_SELECTOR,
    GenerationConfig,
    check_preprocessing,
    check_ratio,
    check_seed,
    parse_bytes,
)
from fused_kv_llm.context_shift import CONTEXT_SHIFT
from fused_kv_llm.errors import ChunkDamagedError, CorpusError
from fused_kv_llm.model import BufferPool, LoadedModel, compute_prefix, load_model
from fused_kv_llm.offline import CorpusPlanner, GivenNeighbours, Ingestor, Similarity, as_embedder
from fused_kv_llm.offline.anchors import AnchorBuilder
from fused_kv_llm.offline.background import BackgroundIngestor
from fused_kv_llm.online import Constraint, FusedPrompt, Generation, Piece, RequestPlanner, decode, fuse
from fused_kv_llm.online.read_ahead import reader_threads
from fused_kv_llm.online.selection import layer_scores, view_of
from fused_kv_llm.prompt import ChatPrompt, PromptRenderer
from fused_kv_llm.report import FusionReport, IngestReport
from fused_kv_llm.selectors import Selector, View, resolve_selector
from fused_kv_llm.store import DEFAULT_POLICY, KVStore
from fused_kv_llm.telemetry import RequestSpan, stage_span

__all__ = ["FusedKVEngine", "Messages"]

Messages = Sequence[dict[str, Any]]


class FusedKVEngine:
    """Answers prompts from precomputed chunk KV.

    Parameters
    ----------
    model : str, Path, transformers.PreTrainedModel or LoadedModel
        Alias ``"smollm2-135m"``, hub id, local folder, a model in memory, or what :func:`load_model` returned.
    tokenizer : str, Path, tokenizer or None
        Defaults to the model's own.
    kv_dir : str or Path
        Folder of the chunk-KV store.
    recompute_ratio : float or "auto"
        Recomputed chunk tokens over chunk tokens, in [0, 1]; 1 is exactly full prefill. ``"auto"`` takes the ratio
        and the selector that ``fused-kv calibrate`` found for this model and corpus.
    selector : str or Selector
        Which tokens to recompute: a key of ``selectors.SELECTORS`` or an object.
    dtype, device
        None decides by the hardware; :attr:`choice` says what was chosen.
    memory_bytes, disk_bytes : int or str, disk_bytes may be None
        Budgets of the store, such as ``"20GB"``: of its memory tier, and of its files (None: what the disk holds).
    policy : str
        Which chunks make room: a key of ``store.POLICIES``.
    kv_dtype : str
        Dtype in which keys and values are stored: ``"auto"`` is the model's own; see ``store.STORAGE_DTYPES``. Chunks
        stored in another one are not found.
    remote : str or None
        URL of a remote tier (``redis://``, ``s3://``, ``file://``): evicted chunks go there and come back when needed.
    preprocessing : {"similar", "none"}
        Whether every chunk is prefilled once more after the chunks most similar to it (FusionRAG section 3.1): what
        that changes is stored beside its KV and brings it closer to what it would be at a later place in a prompt.
    num_neighbours : int
        How many similar chunks: three stand before a chunk at a time, and what they change is averaged.
    embedder : object or None
        What says which chunks are similar: LangChain ``Embeddings``, a LlamaIndex ``BaseEmbedding``, a
        ``SentenceTransformer``; None is all-MiniLM-L6-v2.
    tenant : str
        Salt: stores of different tenants never share KV, even in one folder.
    store_misses : bool
        Whether retrieved chunks that a prompt contains but the store does not are ingested afterwards, in the
        background, so that the next request finds them.
    wrap : bool
        Whether a prompt given as a string becomes one user message of the model's chat template.

    Raises
    ------
    ConfigError
        If an option cannot work.
    ModelNotFoundError, UnsupportedModelError
        If the model cannot be loaded or its KV cannot be moved.
    StoreUnavailableError
        If the folder cannot be used.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | Any = "smollm2-135m",
        *,
        tokenizer: Any | None = None,
        kv_dir: str | Path = "./kv",
        recompute_ratio: float | Literal["auto"] = DEFAULT_RATIO,
        selector: str | Selector = DEFAULT_SELECTOR,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        memory_bytes: int | str = DEFAULT_MEMORY_BYTES,
        disk_bytes: int | str | None = None,
        policy: str = DEFAULT_POLICY,
        kv_dtype: str = "auto",
        remote: str | None = None,
        preprocessing: str = DEFAULT_PREPROCESSING,
        num_neighbours: int = DEFAULT_NEIGHBOURS,
        embedder: Any | None = None,
        tenant: str = "",
        store_misses: bool = True,
        wrap: bool = True,
    ) -> None:
        self.tenant, self.wrap, self.store_misses = tenant, wrap, store_misses
        self.memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
        self.preprocessing, self.num_neighbours = check_preprocessing(preprocessing, num_neighbours)
        self._similarity = (
            Similarity(num_neighbours, as_embedder(embedder), Path(kv_dir) / "vectors.sqlite")
            if preprocessing == "similar"
            else None
        )
        # Wrong options and a folder that cannot be used are known at once; loading a model takes long.
        if recompute_ratio != "auto":
            check_ratio(recompute_ratio)
        resolve_selector(selector)
        self.store = KVStore(
            kv_dir,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            policy=policy,
            kv_dtype=kv_dtype,
            remote=remote,
        )
        try:
            self.loaded = (
                model
                if isinstance(model, LoadedModel)
                else load_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
            )
            self._assemble()
            self.recompute_ratio, self._selector = self._chosen(recompute_ratio, selector)
        except BaseException:
            self.store.close()
            raise

    def _chosen(self, ratio: float | Literal["auto"] | None, selector: str | Selector | None) -> tuple[float, Selector]:
        """Return the ratio and the selector to use; a calibration gives both."""
        if ratio == "auto":
            found = read_calibration(self.store.kv_dir, self.identity)
            return found.recompute_ratio, resolve_selector(found.selector)
        return (
            self.recompute_ratio if ratio is None else check_ratio(ratio),
            self._selector if selector is None else resolve_selector(selector),
        )

    def _assemble(self) -> None:
        self._closed = False
        self._model_lock = threading.Lock()
        self._start_readers()
        self.renderer = PromptRenderer(self.loaded.tokenizer, wrap=self.wrap)
        self.identity = self._identify(self.tenant)
        self.store.describe(self.identity, ", ".join(self._description()))
        self._prefix = compute_prefix(self.loaded, tuple(self.renderer.header_ids))
        self._catalog = ChunkCatalog(self.store, self.identity)
        room = self.context_length - len(self._prefix.token_ids)
        planner = CorpusPlanner(
            self._catalog, self.identity, self.renderer.encode_chunk, room, self._similarity,
            lambda key: self.store.sides.has(key, CONTEXT_SHIFT),
        )  # fmt: skip
        self._ingestor = Ingestor(self.loaded, self.store, self.identity, self._prefix, planner, self._model_lock)
        self._sides = self.store.sides
        self._anchors = AnchorBuilder(
            self.loaded, self.store, self._prefix, self.renderer.encode_chunk, self._model_lock
        )
        self._planner = RequestPlanner(
            self.renderer,
            self.store,
            self.identity,
            self._prefix.token_ids,
            self._catalog,
            self.context_length,
            self.model_id,
            self._remember,
        )
        self._buffers = BufferPool(self.loaded.dtype, self.loaded.device)
        self._background = BackgroundIngestor(self._ingestor) if self.store_misses else None

    def _start_readers(self) -> None:
        threads = reader_threads(self.loaded.device)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="fused-kv-read") if threads else None
        self._readers_pid = os.getpid()

    def _reading_threads(self) -> ThreadPoolExecutor | None:
        # A forked process has none of its parent's threads, and would wait for them.
        if self._readers_pid != os.getpid():
            self._start_readers()
        return self._readers

    def _description(self) -> list[str]:
        stored = [] if self.kv_dtype == "auto" else [f"stored in {self.kv_dtype}"]
        return [self.model_id, self.dtype, *stored, self.preprocessing]

    def _identify(self, tenant: str) -> str:
        ids = ",".join(map(str, self.renderer.header_ids))
        return KVIdentity(
            model=self.loaded.fingerprint,
            tokenizer=self.loaded.tokenizer_fingerprint,
            dtype=self.dtype,
            rope=self.loaded.geometry.rope_digest,
            prefix=hashlib.sha256(ids.encode()).hexdigest(),
            preprocessing="none" if self._similarity is None else f"similar:{self._similarity.count}:{CONTEXT_SHIFT}",
            kv_dtype=self.kv_dtype,
            tenant=tenant,
        ).digest

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @property
    def model_id(self) -> str:
        """Alias, path, hub id or class name of the model."""
        return self.loaded.model_id

    @property
    def model_fingerprint(self) -> str:
        """Content fingerprint of the weights."""
        return self.loaded.fingerprint

    @property
    def device(self) -> str:
        """Where the model is, for example ``"cpu"``."""
        return str(self.loaded.device)

    @property
    def dtype(self) -> str:
        """Compute dtype, for example ``"bfloat16"``."""
        return str(self.loaded.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> str:
        """Dtype in which keys and values are stored; ``"auto"`` is :attr:`dtype`."""
        return "auto" if self.store.kv_dtype == self.dtype else self.store.kv_dtype

    @property
    def choice(self) -> str:
        """Which dtype and device are used, and why."""
        return self.loaded.choice

    @property
    def selector(self) -> str:
        """Name of the default selector."""
        return self._selector.name

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.loaded.geometry.context_length

    def token_ids(self, text: str) -> list[int]:
        """Return a text's ids, special-token text read as ordinary text."""
        return self.renderer.encode_chunk(text)

    def encode(self, prompt: str | Messages | ChatPrompt) -> list[int]:
        """Return the ids the model sees for a prompt: rendered and tokenised once, whole."""
        return list(self.renderer.encode(self.renderer.render(prompt)).ids)

    # -- ingestion -------------------------------------------------------------------------------------------

    def build_kv_cache(
        self,
        texts: Iterable[str],
        *,
        neighbours: GivenNeighbours | None = None,
        refresh: bool = False,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill every chunk once and store its KV; resumes where an interrupted call stopped.

        Parameters
        ----------
        texts : iterable of str
            One chunk each, as they will stand in prompts.
        neighbours : mapping, callable or None
            A caller's own graph, text to similar or linked texts, nearest first; None asks the embedder. Only
            used with ``preprocessing="similar"``.
        refresh : bool
            Whether chunks stored earlier whose neighbours have changed are prefilled again; they are counted
            in ``chunks_stale`` otherwise and stay usable.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If there is nothing to ingest, or one string was given instead of several.
        StoreFullError
            If the disk cannot hold the result.
        """
        chunks = list(_several(texts))
        report = self._ingestor.run(chunks, neighbours=neighbours, refresh=refresh, progress=progress)
        self.build_anchors(chunks, progress=progress)
        return report

    def build_anchors(
        self, texts: Iterable[str], *, selector: str | Selector | None = None, progress: bool = True
    ) -> int:
        """Store the anchors of chunks that are stored already, for selectors that probe with anchors (QCFuse).

        :meth:`build_kv_cache` does it when the engine's own selector needs them.

        Parameters
        ----------
        texts : iterable of str
            The chunks.
        selector : str, Selector or None
            Whose anchors; None is the engine's. One that needs none does nothing.
        progress : bool
            Whether to show a progress bar.

        Returns
        -------
        int
            Chunks whose anchors are new.
        """
        chosen = self._selector if selector is None else resolve_selector(selector)
        view = view_of(chosen, self.loaded, FusionReport())
        if not isinstance(view, View) or view.anchors is None:
            return 0
        keys = self._keys_of([text.strip() for text in _several(texts)])
        return self._anchors.run((key for key in keys if key), view.anchors, view.layers, progress=progress)

    def attention_by_layer(self, prompt: str | Messages, view: View) -> tuple[Tensor, Tensor]:
        """Score a prompt's chunk tokens by the question's attention, layer by layer, for profiling.

        Parameters
        ----------
        prompt : str or list of messages
        view : View
            With anchors.

        Returns
        -------
        positions : Tensor
            int64 ``[C]``, prompt positions of the chunk tokens.
        scores : Tensor
            float32 ``[len(view.layers), C]``.
        """
        request = self._planner.plan(prompt, FusionReport())
        try:
            with self._model_lock:
                scores = layer_scores(self.loaded, request, self._prefix, view, self._buffers, self._sides)
        finally:
            for placement in request.placements:
                placement.stored.close()
        return request.chunk_positions, scores

    def delete_chunks(self, texts: Iterable[str]) -> int:
        """Delete the stored KV of chunks that left the corpus; texts without KV are passed over.

        Parameters
        ----------
        texts : iterable of str

        Returns
        -------
        int
            How many chunks were stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        rows = self._catalog.rows_of([text.strip() for text in _several(texts)])
        self.store.delete({row.key for found in rows.values() for row in found})
        return len(rows)

    def chunk_id(self, text: str) -> str | None:
        """Return the key of a chunk's stored KV, or None where none is stored."""
        return self._keys_of([text.strip()])[0]

    def prefetch(self, texts: Iterable[str]) -> list[str | None]:
        """Start loading the KV of retrieved chunks into memory.

        Parameters
        ----------
        texts : iterable of str
            Retrieved chunks. Those without KV are remembered: if the next prompts contain them, they are
            ingested afterwards (`store_misses`).

        Returns
        -------
        list of str or None
            Their keys; None where no KV is stored.

        Raises
        ------
        CorpusError
            If one string was given instead of several.
        """
        retrieved = [text.strip() for text in _several(texts)]
        keys = self._keys_of(retrieved)
        self.store.prefetch([key for key in keys if key is not None])
        if self._background is not None:
            self._background.expect(text for text, key in zip(retrieved, keys, strict=True) if key is None)
        return keys

    def _keys_of(self, texts: Sequence[str]) -> list[str | None]:
        rows = self._catalog.rows_of(texts)
        return [rows[text][-1].key if text in rows else None for text in texts]

    def stored_texts(self) -> list[str]:
        """Return the text of every chunk whose KV is stored for this model, in the order of ingestion."""
        return list(dict.fromkeys(row.text for row in self._catalog.all_rows()))

    def wait_for_background(self) -> None:
        """Return when no background ingestion is under way."""
        if self._background is not None:
            self._background.wait()

    # -- one request -----------------------------------------------------------------------------------------

    def _remember(self, text: str) -> None:
        if self._background is not None:
            self._background.expect([text])

    def prefill(
        self,
        prompt: str | Messages | ChatPrompt,
        *,
        recompute_ratio: float | Literal["auto"] | None = None,
        selector: str | Selector | None = None,
        max_tokens: int = 1,
        seed: int = 0,
        report: FusionReport | None = None,
    ) -> tuple[FusedPrompt, FusionReport]:
        """Do everything up to the first token's logits.

        Parameters
        ----------
        prompt : str or list of messages
        recompute_ratio, selector
            Override the engine's for this call.
        max_tokens : int
            Room to reserve for the answer.
        seed : int
            For selectors that draw.
        report : FusionReport or None
            A report to fill.

        Returns
        -------
        FusedPrompt, FusionReport

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        ConfigError
            If the ratio or the selector cannot be used.
        """
        ratio, chosen = self._chosen(recompute_ratio, selector)
        check_seed(seed)
        report = FusionReport() if report is None else report
        report.recompute_ratio, report.selector = ratio, chosen.name
        while True:
            started = time.perf_counter()
            with stage_span("align"):
                request = self._planner.plan(prompt, report)
            report.seconds["align"] = report.seconds.get("align", 0.0) + time.perf_counter() - started
            capacity = min(request.num_tokens + max_tokens, self.context_length)
            try:
                with self._model_lock:
                    fused = fuse(
                        self.loaded, request, self._prefix, chosen, ratio, self._reading_threads(), self._buffers,
                        report, capacity=capacity, sides=self._sides, seed=seed,
                    )  # fmt: skip
            except ChunkDamagedError as error:
                # Planned again without the damaged chunk, which is computed as fresh text then.
                for row in self.store.rows([error.key]).values():
                    self._remember(row.text)
                self.store.discard(error.key, error.reason)
                report.chunks_missed += 1
                report.warnings.append(str(error))
            else:
                return fused, report
            finally:
                for placement in request.placements:
                    placement.stored.close()

    def stream(
        self,
        prompt: str | Messages | ChatPrompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] | str | None = (),
        seed: int | None = None,
        recompute_ratio: float | Literal["auto"] | None = None,
        selector: str | Selector | None = None,
        constraint: Constraint | None = None,
    ) -> Generator[Piece]:
        """Answer a prompt, token by token; closing the generator gives its memory back.

        Parameters
        ----------
        prompt : str or list of messages
            A string becomes one user message of the chat template, unless the engine was made with
            ``wrap=False``; messages are rendered as they are.
        max_tokens, temperature, top_p, stop, seed
            See :class:`~fused_kv_llm.config.GenerationConfig`. `max_tokens` is cut to what the context leaves.
        recompute_ratio, selector
            Override the engine's for this call.
        constraint : callable or None
            Called before every choice with the answer's token ids so far and the logits ``[vocabulary]``;
            returns the logits to choose from, for instance with all but the tokens of a grammar at -inf.

        Yields
        ------
        Piece
            The last one has the finish reason and the report.
        """
        started = time.perf_counter()
        config = GenerationConfig.create(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed
        )
        span = RequestSpan(self.model_id)
        try:
            with span.stage("prefill"):
                fused, report = self.prefill(
                    prompt,
                    recompute_ratio=recompute_ratio,
                    selector=selector,
                    max_tokens=config.max_tokens,
                    seed=config.seed or 0,
                )
        except BaseException:
            span.end()
            raise
        pieces = self._decode(fused, config, report, started, constraint, span)
        # Up to its first yield, so that closing it cleans up even if no piece was ever asked for.
        next(pieces)
        return cast("Generator[Piece]", pieces)

    def _decode(
        self,
        fused: FusedPrompt,
        config: GenerationConfig,
        report: FusionReport,
        started: float,
        constraint: Constraint | None,
        span: RequestSpan,
    ) -> Generator[Piece | None]:
        room = fused.cache.get_max_length() - fused.cache.length
        if room < config.max_tokens:
            config = GenerationConfig(room, config.temperature, config.top_p, config.stop, config.seed)
        decoding = span.start("decode")
        try:
            yield None
            yield from decode(self.loaded, fused, config, report, started, self._model_lock, constraint)
        finally:
            fused.cache.release()
            if decoding is not None:
                decoding.end()
            span.end(report.to_dict())
            # Only now: ingestion takes turns with forwards and would delay this answer's tokens.
            if self._background is not None:
                self._background.ingest_expected(fused.text)

    def generate(self, prompt: str | Messages | ChatPrompt, **options: Any) -> Generation:
        """Answer a prompt; the options are those of :meth:`stream`.

        Returns
        -------
        Generation
        """
        pieces = list(self.stream(prompt, **options))
        last = pieces[-1]
        return Generation(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token_id for piece in pieces if piece.token_id is not None],
            finish_reason=last.finish_reason or "length",
            report=last.report or FusionReport(),
        )

    # -- end -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._closed

    def close(self) -> None:
        """Finish background work and close the store; the model stays usable."""
        self._closed = True
        if self._background is not None:
            self._background.close()
        readers = self._reading_threads()
        if readers is not None:
            readers.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def __enter__(self) -> FusedKVEngine:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()


def _several(texts: Iterable[str]) -> Iterable[str]:
    """Refuse one string, which would be read as one chunk a character."""
    if isinstance(texts, str):
        raise CorpusError(f"texts={texts[:40]!r} is one string: pass a list of chunks, [text] for a single one.")
    return texts
