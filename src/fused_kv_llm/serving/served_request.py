"""One request on its way through the engine: waiting, loading, fusing, decoding, done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from torch import Tensor

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import ChunkDamagedError, DeadlineError, RequestCancelledError, StoreError
from fused_kv_llm.model import RaggedPart, may_pause
from fused_kv_llm.online import FusedPrompt, Fusion, Recipe, Request, Sharing
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport, RequestSpan
from fused_kv_llm.verdicts import JudgedPrompt

from .handle import RequestHandle
from .home import RequestHome
from .loader import Loader
from .prompt_plan import PromptPlan
from .terms import Terms
from .written_answer import WrittenAnswer

__all__ = ["RequestState", "ServedRequest"]


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"
    FUSING = "fusing"
    HELD = "held"
    DECODING = "decoding"
    DONE = "done"


class ServedRequest:
    """One request; all but :meth:`plan` is called by the thread that owns the model.

    Parameters
    ----------
    home : RequestHome
    prompt : str or list of messages
    recipe : Recipe
    config : GenerationConfig
    constraint : Constraint or None
    terms : Terms
    on_cancel : callable
        Tells the step loop that this request was cancelled; see :class:`.handle.RequestHandle`.
    provisional : bool
        Whether nobody has asked this yet. Such a request is held when its prompt is complete, until :meth:`go_on`.
        Before, its chunks are no hits, and its KV is left to nobody; policies do learn what it used.

    Attributes
    ----------
    provisional : bool
        Whether it still is.
    is_dropped : bool
        Whether a provisional request is given up, and cannot be confirmed. The step loop's guard is held to set it.
    expires_s : float
        ``time.perf_counter()`` at which a provisional request is dropped.
    successor_ids : sequence of int
        The prompt that comes in place of a provisional request: what both begin with is left to it.
    handle : RequestHandle
    state : RequestState
    max_tokens : int
        Of the answer.
    prompt_plan : PromptPlan
        Its prompt until it is computed, and how far that is loaded.
    answer : WrittenAnswer
        Its prompt once it is computed, and what is written behind it.
    prompt_tokens, kv_nbytes : int
        Tokens of the prompt, and bytes of its KV with room for the answer, without what it shares; 0 before it is
        planned.
    chunk_keys : frozenset of str
        Of the chunks that its prompt has.
    cached_ratio : float or None
        Tokens of its prompt that are cached, over those that would have to be computed; None before it is measured.
    overtaken : int
        How many that came later have been taken from the queue before it.
    failures : int
        How often in a row it has failed by itself; 0 after every new token.
    wants_shared : callable
        Whether it is to share its chunks' pages once its prompt is complete, see :meth:`.RunningKV.wants_shared`.
    """

    def __init__(
        self,
        home: RequestHome,
        prompt: Prompt,
        recipe: Recipe,
        config: GenerationConfig,
        constraint: Constraint | None,
        terms: Terms,
        on_cancel: Callable[[ServedRequest], None],
        *,
        provisional: bool = False,
    ) -> None:
        self.home, self.terms = home, terms
        self.provisional, self.is_dropped = provisional, False
        self.expires_s = float("inf")
        self.successor_ids: Sequence[int] = ()
        self.state = RequestState.WAITING
        self.arrived_s = time.perf_counter()
        self.report = FusionReport(recompute_ratio=recipe.ratio, selector=recipe.selector.name, called_s=self.arrived_s)
        self.report.warnings += terms.warnings
        self.handle = RequestHandle(lambda: on_cancel(self), self.report)
        self.prompt_plan = PromptPlan(home, prompt, recipe)
        self._recipe, self._config, self._constraint = recipe, config, constraint
        self.max_tokens, self.prompt_tokens, self.kv_nbytes, self._capacity = config.max_tokens, 0, 0, 0
        self.chunk_keys = frozenset[str]()
        self.cached_ratio: float | None = None
        self.overtaken = self.failures = 0
        self.wants_shared: Callable[[ServedRequest, Sharing | None], bool] = lambda request, sharing: False
        self._span = RequestSpan(home.context.loaded.model_id, "prefill")
        self._judged: JudgedPrompt | None = None
        self._fusion: Fusion | None = None
        self.answer = WrittenAnswer(home.context.loaded)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, and holds nothing."""
        return self.state is RequestState.DONE

    @property
    def has_begun(self) -> bool:
        """Whether something of it has been computed, or was sent before it began anew."""
        return self.state not in (RequestState.WAITING, RequestState.LOADING) or self.answer.has_begun

    @property
    def deadline_s(self) -> float:
        """``time.perf_counter()`` at which the request is given up."""
        if self.provisional:
            return self.expires_s
        return float("inf") if self.terms.timeout_s is None else self.arrived_s + self.terms.timeout_s

    # -- stages ----------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Find out how much of its prompt is cached; any thread may do it while it waits.

        Raises
        ------
        PromptError, PromptTooLongError
            As :meth:`plan` does.
        """
        # It is not tried again if it fails.
        self.cached_ratio = 0.0
        self.cached_ratio = self.prompt_plan.measure()

    def plan(self, loader: Loader | None, on_change: Callable[[], None], *, ahead: bool) -> None:
        """Tokenise the prompt, find its chunks and open them, and begin to load them; any thread may do it.

        Parameters
        ----------
        loader : Loader or None
            Loads what is slow to read, or what is needed while others are computed; without it, layers are read when
            they are needed.
        on_change : callable
            Called by a thread of the loader when more has been loaded.
        ahead : bool
            Whether others are computed meanwhile.

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        AbandonedPlanError
            If the request has ended, or begun anew, meanwhile.
        """
        report = self.report
        if "queue" not in report.seconds:
            report.spend("queue", self.arrived_s, time.perf_counter())
        span, provisional = self._span.within("align"), self.provisional
        self._describe(self.prompt_plan.plan(loader, on_change, report, span, ahead=ahead, provisional=provisional))

    def _describe(self, planned: Request) -> None:
        loaded, self.prompt_tokens = self.home.context.loaded, planned.num_tokens
        room = self._recipe.room_tokens(self.max_tokens)
        self._capacity = min(self.prompt_tokens + room, self.home.context_length)
        self.kv_nbytes = self._capacity * loaded.geometry.kv_bytes_per_token(loaded.dtype)
        self._judged = planned.judged
        self.chunk_keys = frozenset(chunk.stored.key for chunk in planned.chunks)

    def begin(self) -> None:
        """Choose what is recomputed.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged; :meth:`plan_again` goes on without it.
        """
        opened = self.prompt_plan.opened
        if opened is None:
            return
        self.state = RequestState.FUSING
        self.home.check_unchanged()
        self.prompt_plan.check(self.report)
        with self._span.within():
            self._fusion = Fusion(self.home.context, opened, self._recipe, self._capacity, self.report)
            # Its chunks are the fusion's from here on.
            self.prompt_plan.opened = None
            self._fusion.begin()

    def select(self) -> None:
        """Choose what is recomputed; see :meth:`fused_kv_llm.online.Fusion.select`."""
        if self._fusion is not None:
            with self._span.within():
                self._fusion.select()

    @property
    def may_pause(self) -> bool:
        """Whether its prompt's passes may be left between two layers, see :meth:`advance`."""
        return may_pause(self.home.context.loaded.model.get_decoder())

    def advance(self, pause_at_s: float, max_rows: int | None) -> FusedPrompt | None:
        """Compute its prompt by itself until a moment, see :meth:`fused_kv_llm.online.Fusion.advance`.

        Returns
        -------
        FusedPrompt or None
            What :meth:`take` takes, if nothing is left to do.

        Raises
        ------
        ChunkDamagedError
            As :meth:`begin` does.
        """
        if self._fusion is None:
            return None
        with self._span.within():
            prompt = self._fusion.advance(pause_at_s, max_rows)
        if prompt is not None:
            seconds = self.report.seconds
            self.prompt_plan.learn(seconds.get("probe", 0.0) + seconds["fuse"] - self._fusion.read_s)
        return prompt

    def go_on(self, config: GenerationConfig, constraint: Constraint | None, terms: Terms, asked_s: float) -> None:
        """Answer what was provisional so far.

        Parameters
        ----------
        config, constraint, terms
            How; `max_tokens` is no larger than it was.
        asked_s : float
            ``time.perf_counter()`` when it was asked.
        """
        self._config, self._constraint, self.terms, self.arrived_s = config, constraint, terms, asked_s
        self.provisional = False
        self.report.count_from(asked_s)
        self.report.warnings += terms.warnings
        if self.answer.prompt is not None:
            self.take(self.answer.prompt)

    def plan_again(self, error: ChunkDamagedError) -> None:
        """Go back to planning, without a chunk that turned out to be damaged."""
        self.begin_anew()
        self.home.discard(error, self.report)

    def give_up_loading(self, lost_key: str | None = None) -> None:
        """Begin anew without the chunks that do not come; the second time, without any that is not loaded.

        Parameters
        ----------
        lost_key : str or None
            The chunk that was waited for, if that is known.
        """
        self.prompt_plan.give_up(lost_key)
        if not self.answer.has_begun:
            # The other one is written to by a thread that may come back.
            self.report = replace(self.report, warnings=[*self.report.warnings], seconds={**self.report.seconds})
            self.handle.report = self.report
        self.begin_anew()

    def begin_anew(self) -> None:
        """Give back what it holds and go back to planning; its answer goes on after the tokens that were sent."""
        self.prompt_plan.close()
        self._close_fusion()
        self.answer.release()
        self._span.end_slice()
        if self.state is RequestState.DECODING:
            self._span.enter("prefill")
        self.state = RequestState.WAITING

    def part(self, max_rows: int | None) -> RaggedPart:
        """Return what this request has computed next: a slice of its prompt, or the answer's tokens without KV."""
        if self._fusion is not None:
            self._span.begin_slice()
            return self._fusion.next_slice(max_rows)
        return self.answer.next_part()

    def computed(self, logits: Tensor, seconds: float) -> None:
        """Take the logits ``[vocabulary]`` after this request's last row, of a step that took `seconds`."""
        if self._fusion is not None:
            now_s = time.perf_counter()
            self.report.spend("fuse", now_s - seconds, now_s)
            self._span.end_slice()
            prompt = self._fusion.computed(logits)
            if prompt is not None:
                self.take(prompt)
            return
        self.answer.computed()
        self._write(logits)

    def end(self, error: BaseException | None = None) -> None:
        """Give back what the request holds; tell its caller why, unless its answer is complete."""
        if self.state is RequestState.DONE:
            return
        self.state = RequestState.DONE
        try:
            # What an error has spoilt is of no use to others.
            if error is None or isinstance(error, (RequestCancelledError, DeadlineError)):
                self._leave()
        finally:
            try:
                self._give_back()
            finally:
                if error is not None:
                    self.handle.put(error)

    # -- inside ----------------------------------------------------------------------------------------------

    def _share(self, fusion: Fusion, fused: FusedPrompt) -> None:
        sharing = fusion.sharing()
        if (sharing is None and not fusion.why_private) or not self.wants_shared(self, sharing):
            return
        if sharing is None:
            self.report.not_shared = fusion.why_private
            return
        if not bool(fused.logits.isnan().any()):
            # The last time that all of it stands in one place.
            self._leave()
        try:
            fused.cache, self.report.shared_kv_bytes = sharing.share()
        except (ChunkDamagedError, StoreError, MemoryError, RuntimeError) as error:
            # It only saves memory, and the copy is as it was.
            self.report.not_shared = f"a chunk's page could not be made: {error}"
        else:
            self.kv_nbytes = self.report.own_kv_bytes = fused.cache.nbytes

    def _leave(self) -> None:
        """Leave to later requests what is complete of the prompt and the answer.

        What nobody has asked is left to nobody, but for what the prompt in its place begins with too.
        """
        if self.answer.prompt is not None:
            left = self.answer.kept()
        else:
            left = None if self._fusion is None else self._fusion.complete
        if left is None:
            return
        cache, kept = left
        if self.provisional:
            kept = kept.common_with(self.successor_ids)
        if kept.ids:
            self.home.keep(kept, cache)

    def _give_back(self) -> None:
        self.prompt_plan.close()
        self._close_fusion()
        prompt = self.answer.prompt
        self.answer.release()
        if prompt is not None and not self.provisional:
            self.home.answered(prompt.text)
        self._span.end(self.report.to_dict())

    def take(self, prompt: FusedPrompt) -> None:
        """Go on with a complete prompt: send its first token, and decode; a provisional one is held."""
        self.answer.prompt = prompt
        if self.provisional:
            self.state = RequestState.HELD
            return
        self.prompt_plan.count()
        if self._fusion is not None:
            self.report.read_s += self._fusion.read_s
        if self.answer.has_begun:
            # It began anew, and has sent a part of its answer before.
            self._span.enter("decode")
            self.state, self.report.own_kv_bytes, self.report.shared_kv_bytes = RequestState.DECODING, self.kv_nbytes, 0
            self._close_fusion()
            return
        self._begin_decoding()
        # The first token does not wait for what only saves memory. If it is the last, all has been given back.
        self._write(prompt.logits)
        if self._fusion is not None:
            self._share(self._fusion, prompt)
        self._close_fusion()

    def _begin_decoding(self) -> None:
        self.state = RequestState.DECODING
        self._span.enter("decode")
        if self.terms.expected:
            self.handle.on_report = self._judge
        self.report.own_kv_bytes = self.kv_nbytes
        self.answer.begin(self._config, self.report, self.arrived_s, self._constraint)

    def _write(self, logits: Tensor) -> None:
        piece = self.answer.write(logits)
        self.failures = 0
        if piece.finish_reason is not None:
            # Given back before the caller learns that it is over.
            try:
                self.end()
            finally:
                self.handle.put(piece)
            return
        self.handle.put(piece)

    def _judge(self, report: FusionReport) -> None:
        """Say of the chunks that were expected what became of them; called by the caller's thread."""
        if self._judged is None:
            return
        try:
            self.home.judge_expected(self.terms.expected, self._judged, report)
        except StoreError as error:
            report.warnings.append(f"nothing was found out about chunks that were not reused: {error}")

    def _close_fusion(self) -> None:
        fusion, self._fusion = self._fusion, None
        if fusion is not None:
            fusion.close()
