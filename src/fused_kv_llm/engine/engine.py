"""The whole algorithm on one page: plan -> load -> select -> fuse -> generate.

Everything below happens in the rooms it imports; requests of several threads are kept apart here.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, Literal, cast

from torch import Tensor

from fused_kv_llm.config import GenerationConfig, check_seed
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.engine.corpus import EngineCorpus
from fused_kv_llm.engine.parts import Messages
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.online import FusedPrompt, Generation, Piece, decode, fuse, layer_scores
from fused_kv_llm.prompt import ChatPrompt
from fused_kv_llm.report import FusionReport, RequestSpan, stage_span
from fused_kv_llm.selectors import Selector, View

__all__ = ["FusedKVEngine"]


class FusedKVEngine(EngineCorpus):
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
                readers = None if self._readers is None else self._readers.executor()
                with self._model_lock:
                    fused = fuse(
                        self.loaded, request, self._prefix, chosen, ratio, readers, self._buffers, report,
                        capacity=capacity, sides=self._sides, seed=seed,
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
