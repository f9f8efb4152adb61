"""The whole algorithm on one page: plan -> load -> select -> fuse -> generate.

The rooms that are imported do the work; requests of several threads are kept apart here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.model import CachePool
from fused_kv_llm.online import (
    FusedPrompt,
    FusionContext,
    PieceStream,
    Recipe,
    RequestPlanner,
    decode,
    fuse,
    layer_scores,
    reader_threads,
)
from fused_kv_llm.prompt import ChatPrompt
from fused_kv_llm.report import FusionReport, RequestSpan, stage_span
from fused_kv_llm.selectors import View
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
        self._model_lock = parts.model_lock
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
        threads = reader_threads(parts.loaded.device)
        self._readers = ThreadPool(threads, "fused-kv-read") if threads else None
        pool = CachePool(parts.loaded.dtype, parts.loaded.device)
        self.context = FusionContext(
            parts.loaded, parts.prefix, pool, parts.store.sidecars, self._readers, parts.shift_name
        )
        self._context_length = parts.context_length

    def prefill(
        self, prompt: str | Messages | ChatPrompt, recipe: Recipe, max_tokens: int, report: FusionReport
    ) -> FusedPrompt:
        """Do everything up to the first token's logits."""
        report.recompute_ratio, report.selector = recipe.ratio, recipe.selector.name
        while True:
            started = time.perf_counter()
            with stage_span("align"):
                request = self.planner.plan(prompt, report)
            report.seconds["align"] = report.seconds.get("align", 0.0) + time.perf_counter() - started
            capacity = min(request.num_tokens + max_tokens, self._context_length)
            try:
                with request, self._model_lock:
                    self._loaded.check_unchanged()
                    return fuse(self.context, request, recipe, capacity, report)
            except ChunkDamagedError as error:
                # Planned again without the damaged chunk, which is computed as fresh text then.
                self._corpus.expect(row.text for row in self._store.rows([error.key]).values())
                self._store.discard(error.key, error.reason)
                report.chunks_missed += 1
                report.warnings.append(str(error))

    def stream(
        self,
        prompt: str | Messages | ChatPrompt,
        recipe: Recipe,
        config: GenerationConfig,
        constraint: Constraint | None,
    ) -> PieceStream:
        """Answer a prompt, token by token; closing or dropping the stream gives its memory back."""
        started = time.perf_counter()
        report, span = FusionReport(), RequestSpan(self._loaded.model_id)
        try:
            with span.stage("prefill"):
                fused = self.prefill(prompt, recipe, config.max_tokens, report)
        except BaseException:
            span.end()
            raise
        # Last in, first out. Ingestion comes at the end: it takes turns with forwards and would delay this answer.
        resources = ExitStack()
        resources.callback(self._corpus.ingest_expected, fused.text)
        resources.callback(lambda: span.end(report.to_dict()))
        decoding = span.start("decode")
        if decoding is not None:
            resources.callback(decoding.end)
        resources.callback(fused.cache.release)
        room = fused.cache.get_max_length() - fused.cache.length
        config = replace(config, max_tokens=min(room, config.max_tokens))
        pieces = decode(self._loaded, fused, config, report, started, self._model_lock, constraint)
        return PieceStream(pieces, resources)

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
        with self.planner.plan(prompt, FusionReport()) as request, self._model_lock:
            self._loaded.check_unchanged()
            return request.chunk_positions, layer_scores(self.context, request, view)

    def close(self) -> None:
        """Stop the threads that read ahead."""
        if self._readers is not None:
            self._readers.close()
