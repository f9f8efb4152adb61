"""What an engine does with prompts: plan, and hand over to the step loop that all engines of a model share.

The algorithm is in the rooms below: :mod:`fused_kv_llm.online` takes one request from its prompt to its answer,
:mod:`fused_kv_llm.serving` runs many of them beside each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import ChunkDamagedError, ModelChangedError, VariantDamagedError
from fused_kv_llm.kv import PagePool, PrefixMatch, PrefixTree, why_not_shared
from fused_kv_llm.model import CachePool, FusedCache
from fused_kv_llm.online import (
    MIN_REUSED_TOKENS,
    ChunkFinder,
    ChunkOpener,
    FusedPrompt,
    FusionContext,
    KeptPrompt,
    ReadPrompt,
    Recipe,
    Request,
    RequestPlanner,
    TakeKV,
    VariantChoice,
    fuse,
    fused_recipe,
    layer_scores,
    reader_threads,
)
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport, Outcome, stage_span
from fused_kv_llm.selectors import View, variant_selector
from fused_kv_llm.serving import HungReads, Limits, RecoveryCounts, RequestHandle, ServedRequest, Terms, loop_of
from fused_kv_llm.thread_pool import ThreadPool
from fused_kv_llm.verdicts import Judge, JudgedPrompt, verdict_of

from .corpus import EngineCorpus
from .parts import EngineParts
from .speculation import Speculations

__all__ = ["Messages", "RequestRunner"]

Messages = Sequence[dict[str, Any]]

_log = logging.getLogger(__name__)


class RequestRunner:
    """What is done with prompts; ``FusedKVEngine`` describes its public methods.

    Parameters
    ----------
    parts : EngineParts
    corpus : EngineCorpus
        Learns of chunks that are missing or damaged.
    limits : Limits
    prefixes : PrefixTree
        What requests leave to later ones.
    tenant : str
        Tenants take turns.
    """

    def __init__(
        self, parts: EngineParts, corpus: EngineCorpus, limits: Limits, prefixes: PrefixTree, tenant: str
    ) -> None:
        self._loaded, self._store, self._corpus = parts.loaded, parts.store, corpus
        self._model_lock, self.closed, self.hung = parts.model_lock, False, HungReads()
        self.limits, self.tenant, self.context_length = limits, tenant, parts.context_length
        self.planner = RequestPlanner(
            parts.renderer,
            ChunkFinder(parts.catalog, parts.prefix.token_ids),
            ChunkOpener(parts.store, parts.identity, parts.replacement),
            parts.context_length,
            parts.loaded.model_id,
            lambda text: corpus.expect([text]),
        )
        self.judge = Judge(
            parts.store,
            parts.catalog,
            parts.namespace,
            parts.renderer.encode_chunk,
            min_tokens=MIN_REUSED_TOKENS,
            room=parts.context_length - len(parts.prefix.token_ids),
        )
        self._variants = None if corpus.variants is None else VariantChoice(corpus.variants)
        threads = reader_threads(parts.loaded.device)
        self._readers = ThreadPool(threads, "fused-kv-read") if threads else None
        pool = CachePool(parts.loaded.dtype, parts.loaded.device)
        geometry, device = parts.loaded.geometry, parts.loaded.device
        shares = limits.share_chunk_kv != "never"
        why_not = why_not_shared(geometry, device) or "" if shares else ""
        self.context = FusionContext(
            parts.loaded, parts.prefix, pool, parts.store.sidecars, self._readers, parts.shift_name,
            PagePool(geometry) if shares and not why_not else None, why_not, weigh_use=parts.store.weigh_use,
        )  # fmt: skip
        self.prefixes = prefixes
        self._loop = loop_of(parts.loaded.model)
        self.speculations = Speculations(self._loop, self, parts.renderer)

    def submit(
        self,
        prompt: Prompt,
        recipe: Recipe,
        config: GenerationConfig,
        constraint: Constraint | None,
        terms: Terms,
    ) -> RequestHandle:
        """Have a prompt answered, beside the requests of others."""
        self._loop.check_caller()
        # Planned later: the caller's messages may be others by then.
        prompt = prompt if isinstance(prompt, str) else deepcopy(prompt)
        found = self.speculations.claim(prompt, recipe, config, constraint, terms)
        if isinstance(found, RequestHandle):
            return found
        request = ServedRequest(self, prompt, recipe, config, constraint, terms, self._loop.cancel)
        if found is not None:
            found.describe(request.report)
        try:
            self._loop.submit(request)
        except BaseException:
            request.end()
            raise
        return request.handle

    def prefill(self, prompt: Prompt, recipe: Recipe, max_tokens: int, report: FusionReport) -> FusedPrompt:
        """Do everything up to the first token's logits, in the caller's thread and without the prefix tree."""
        report.recompute_ratio, report.selector = recipe.ratio, recipe.selector.name
        while True:
            started = time.perf_counter()
            with stage_span("align"):
                request = self.planner.plan(prompt, report, take=self._take(recipe, report))
                self.keep_variants(request)
            report.spend("align", started, time.perf_counter())
            capacity = min(request.num_tokens + recipe.room_tokens(max_tokens), self.context_length)
            try:
                with request, self._model_lock:
                    self.check_unchanged()
                    return fuse(self.context, request, recipe, capacity, report)
            except ChunkDamagedError as error:
                self.discard(error, report)

    @property
    def recovery(self) -> RecoveryCounts:
        """What had to be tried again, or given up, of the requests of this model."""
        return self._loop.scheduler.recovery.counts

    @property
    def is_busy(self) -> bool:
        """Whether requests of this model are being answered or wait."""
        return self._loop.is_busy

    @property
    def open(self) -> tuple[int, int]:
        """How many requests of this model, of all its engines, are being answered, and how many wait."""
        return self._loop.open_requests

    def ahead_of(self, handle: RequestHandle, *, of_all: bool) -> int | None:
        """Return how many requests that wait came before one of this model.

        Parameters
        ----------
        handle : RequestHandle
        of_all : bool
            Whether those of other tenants count; how many they are may be nobody else's business.

        Returns
        -------
        int or None
            None once something of it has been computed, or it has ended.
        """
        return self._loop.ahead_of(handle, of_all=of_all)

    def give_up_waiting(self, error: BaseException) -> None:
        """Have requests of this model that have not begun end with an error; those that have begun go on."""
        self._loop.give_up_waiting(error)

    # -- what the step loop asks for -------------------------------------------------------------------------

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Render and tokenise a prompt."""
        return self.planner.read(prompt)

    def cached_tokens(self, prompt: ReadPrompt, recipe: Recipe) -> float:
        """Return how many of a prompt's tokens would not have to be computed now."""
        key = fused_recipe(recipe, self._loaded, self.context.shift_name)

        def known(ids: list[int], first_chunk: int) -> int:
            if not recipe.prefix_cache:
                return 0
            return self.prefixes.known_tokens(ids, key, len(ids) if recipe.ratio >= 1 else first_chunk)

        return self.planner.cached_tokens(prompt, recipe.ratio, known)

    def plan_served(
        self,
        prompt: ReadPrompt,
        recipe: Recipe,
        report: FusionReport,
        *,
        counted: bool = True,
        skip: Callable[[str], bool] = lambda key: False,
    ) -> Request:
        """Find what earlier requests have left of a prompt, and open the chunks of the rest."""
        return self._plan(prompt, recipe, report, counted=counted, skip=skip)

    def uses_of(self, request: Request, report: FusionReport) -> Callable[[], None]:
        """Return a function that counts the uses of a request's chunks, for when the request is confirmed."""
        tiers = {str(chunk.segment.key): chunk.stored.tier for chunk in request.chunks}
        missed, keep = report.chunks_missed, partial(self.keep_variants, request)

        def count() -> None:
            self._store.count_uses(tiers, missed=missed)
            keep()

        return count

    def _plan(
        self, prompt: ReadPrompt, recipe: Recipe, report: FusionReport, *, counted: bool, skip: Callable[[str], bool]
    ) -> Request:
        take = self._take(recipe, report)
        if self.prefixes.max_bytes == 0 or not recipe.prefix_cache:
            return self.planner.plan(prompt, report, take=take, counted=counted, skip=skip)
        key = fused_recipe(recipe, self._loaded, self.context.shift_name)

        def find(ids: list[int], first_chunk: int) -> PrefixMatch:
            # A chunk that was computed in full for somebody else would be one whose tokens are not selected from.
            return self.prefixes.match(ids, key, len(ids) if recipe.ratio >= 1 else first_chunk)

        return self.planner.plan(prompt, report, find, take, counted=counted, skip=skip)

    def _take(self, recipe: Recipe, report: FusionReport) -> TakeKV | None:
        """Return what takes variants of chunks; None if plain KV is to be used, or none at all."""
        choice, selector = self._variants, variant_selector(recipe.selector)
        if choice is None or selector is None or recipe.ratio >= 1:
            return None
        return lambda chunk, before: choice.take(chunk, before, selector, report)

    def keep_variants(self, request: Request) -> None:
        """Have the chunks of a prompt kept as they are in it, later and in the background."""
        if self._variants is not None:
            self._corpus.keep_variants(request.ids, request.segments)

    def keep(self, kept: KeptPrompt, cache: FusedCache) -> None:
        """Keep what later requests may use of a request's KV; what cannot be kept is not."""
        if kept.since is None:
            return
        try:
            # What was computed since the request began may be of another model.
            self.check_unchanged()
            self.prefixes.insert(kept.ids, kept.runs, cache.keys[:, 0], cache.values[:, 0], kept.since)
        except ModelChangedError:
            return
        except (MemoryError, RuntimeError) as error:
            # Requests need the memory more.
            _log.warning("The prefix cache was emptied, since there is no memory for it: %s", error)
            self.prefixes.clear()

    def judge_expected(
        self, expected: Sequence[str], prompt: JudgedPrompt, report: FusionReport, *, operator: bool = False
    ) -> None:
        """Put verdicts on the chunks that were expected in a prompt before those on the others."""
        told = [one for one in report.verdicts if not one.is_reused]
        verdicts = self.judge.judge(expected, prompt, told, operator=operator)
        keys = {one.chunk_id for one in verdicts}
        report.verdicts = [*verdicts, *(one for one in report.verdicts if one.chunk_id not in keys)]

    def discard(self, error: ChunkDamagedError, report: FusionReport) -> None:
        """Put a damaged chunk away; the next plan has it computed as fresh text, or takes its plain KV."""
        if isinstance(error, VariantDamagedError):
            if self._variants is not None:
                self._variants.discard(error, report)
            return
        rows = list(self._store.rows([error.key]).values())
        detail = f"Its file could not be used: {error.reason}."
        lost = [verdict_of(row.text, Outcome.DAMAGED, detail, row.key) for row in rows]
        report.verdicts = [*report.verdicts, *lost]
        self._corpus.expect(row.text for row in rows)
        self._store.discard(error.key, error.reason)
        report.chunks_missed += 1
        report.warnings.append(str(error))

    def check_unchanged(self) -> None:
        """Make sure that the model is still the one whose KV is stored."""
        try:
            self._loaded.check_unchanged()
        except ModelChangedError:
            self.prefixes.clear()
            raise

    def forget_device(self) -> None:
        """Forget what the prefix tree had on the device only."""
        self.prefixes.lose_device()

    def lose_device(self) -> None:
        """Go on after the device's KV was lost, at the next step: requests begin anew with what the host has copies of.

        The model has to be there, or there again.
        """
        self._loop.lose_device(self)

    def answered(self, prompt_text: str) -> None:
        """Ingest chunks that the prompt had and the store lacks; earlier it would delay the answer."""
        self._corpus.ingest_expected(prompt_text)

    def attention_by_layer(self, prompt: str | Messages, view: View) -> tuple[Tensor, Tensor]:
        """Score a prompt's chunk tokens by the question's attention, layer by layer, for profiling.

        Parameters
        ----------
        prompt : str or list of messages
        view : View
            With layers; it sees anchors, the whole context or the question alone.

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
        """Give up the requests that are not answered yet, and stop the threads that read ahead."""
        self.closed = True
        self.speculations.close()
        self._loop.close(self)
        self.prefixes.clear()
        if self._readers is not None:
            self._readers.close()
