"""The whole algorithm on one page: plan -> load -> select -> fuse -> generate.

Everything below happens in the rooms it imports; requests of several threads are kept apart here.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, cast

from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.model import BufferPool
from fused_kv_llm.online import FusedPrompt, Piece, RequestPlanner, decode, fuse, layer_scores, reader_threads
from fused_kv_llm.prompt import ChatPrompt
from fused_kv_llm.report import FusionReport, RequestSpan, stage_span
from fused_kv_llm.selectors import Selector, View
from fused_kv_llm.thread_pool import ThreadPool

from .corpus import EngineCorpus
from .parts import EngineParts

__all__ = ["Messages", "RequestRunner"]

Messages = Sequence[dict[str, Any]]


class RequestRunner:
    """What is done with prompts; ``FusedKVEngine`` describes its public methods.

    Parameters
    ----------
    parts : EngineParts
    corpus : EngineCorpus
        Learns of chunks that are missing or damaged.
    """

    def __init__(self, parts: EngineParts, corpus: EngineCorpus) -> None:
        self._loaded, self._store, self._corpus = parts.loaded, parts.store, corpus
        self._prefix, self._model_lock = parts.prefix, parts.model_lock
        self.planner = RequestPlanner(
            parts.renderer,
            parts.store,
            parts.identity,
            parts.prefix.token_ids,
            parts.catalog,
            parts.context_length,
            parts.loaded.model_id,
            lambda text: corpus.expect([text]),
        )
        self.buffers = BufferPool(parts.loaded.dtype, parts.loaded.device)
        self._context_length = parts.context_length
        threads = reader_threads(parts.loaded.device)
        self._readers = ThreadPool(threads, "fused-kv-read") if threads else None

    def prefill(
        self,
        prompt: str | Messages | ChatPrompt,
        ratio: float,
        selector: Selector,
        *,
        max_tokens: int,
        seed: int,
        report: FusionReport,
    ) -> FusedPrompt:
        """Do everything up to the first token's logits."""
        report.recompute_ratio, report.selector = ratio, selector.name
        while True:
            started = time.perf_counter()
            with stage_span("align"):
                request = self.planner.plan(prompt, report)
            report.seconds["align"] = report.seconds.get("align", 0.0) + time.perf_counter() - started
            capacity = min(request.num_tokens + max_tokens, self._context_length)
            try:
                readers = None if self._readers is None else self._readers.executor()
                with self._model_lock:
                    return fuse(
                        self._loaded, request, self._prefix, selector, ratio, readers, self.buffers, report,
                        capacity=capacity, sides=self._store.sidecars, seed=seed,
                    )  # fmt: skip
            except ChunkDamagedError as error:
                # Planned again without the damaged chunk, which is computed as fresh text then.
                self._corpus.expect(row.text for row in self._store.rows([error.key]).values())
                self._store.discard(error.key, error.reason)
                report.chunks_missed += 1
                report.warnings.append(str(error))
            finally:
                for placement in request.placements:
                    placement.stored.close()

    def stream(
        self,
        prompt: str | Messages | ChatPrompt,
        ratio: float,
        selector: Selector,
        config: GenerationConfig,
        constraint: Constraint | None,
    ) -> Generator[Piece]:
        """Answer a prompt, token by token; closing the generator gives its memory back."""
        started = time.perf_counter()
        report, span = FusionReport(), RequestSpan(self._loaded.model_id)
        try:
            with span.stage("prefill"):
                fused = self.prefill(
                    prompt, ratio, selector, max_tokens=config.max_tokens, seed=config.seed or 0, report=report
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
            yield from decode(self._loaded, fused, config, report, started, self._model_lock, constraint)
        finally:
            fused.cache.release()
            if decoding is not None:
                decoding.end()
            span.end(report.to_dict())
            # Only now: ingestion takes turns with forwards and would delay this answer's tokens.
            self._corpus.ingest_expected(fused.text)

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
        request = self.planner.plan(prompt, FusionReport())
        try:
            with self._model_lock:
                scores = layer_scores(self._loaded, request, self._prefix, view, self.buffers, self._store.sidecars)
        finally:
            for placement in request.placements:
                placement.stored.close()
        return request.chunk_positions, scores

    def close(self) -> None:
        """Stop the threads that read ahead."""
        if self._readers is not None:
            self._readers.close()
