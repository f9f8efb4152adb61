"""A request's prompt before it is computed: its token ids, its open chunks, and how far they are loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from fused_kv_llm.online import STUCK_S, ReadPrompt, Recipe, Request, RequestLoading
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport

from .home import RequestHome
from .loader import Loader

__all__ = ["AbandonedPlanError", "PromptPlan"]


class AbandonedPlanError(Exception):
    """A prompt was planned for a request that has ended, or begun anew, meanwhile."""


class PromptPlan:
    """Plans one prompt, as often as its request begins anew, and knows whether what it has to load comes.

    Another thread may plan while the thread that computes asks or begins anew; a plan that comes too late is closed.

    Parameters
    ----------
    home : RequestHome
    prompt : str or list of messages
    recipe : Recipe

    Attributes
    ----------
    opened : Request or None
        The prompt with its open chunks, from :meth:`plan` until somebody takes it and closes it.
    asked_s : float
        ``time.perf_counter()`` when the loop had it planned.
    """

    def __init__(self, home: RequestHome, prompt: Prompt, recipe: Recipe) -> None:
        self._home, self._prompt, self._recipe = home, prompt, recipe
        self.opened: Request | None = None
        self.asked_s = 0.0
        self._read: ReadPrompt | None = None
        self._loading: RequestLoading | None = None
        self._count_uses: Callable[[], None] | None = None
        self._is_counted = False
        # What a thread has planned is taken if the request has not begun anew meanwhile.
        self._publishing, self._attempt = threading.Lock(), 0
        self._hung_keys, self._all_hung = set[str](), False

    def measure(self) -> float:
        """Return how many tokens of the prompt are cached, over those that would have to be computed.

        Raises
        ------
        PromptError, PromptTooLongError
            As :meth:`plan` does.
        """
        self._read = read = self._home.read(self._prompt)
        cached = self._home.cached_tokens(read, self._recipe)
        return cached / max(1.0, len(read.ids) - cached)

    def plan(
        self,
        loader: Loader | None,
        on_change: Callable[[], None],
        report: FusionReport,
        span: AbstractContextManager[None],
        *,
        ahead: bool,
        provisional: bool,
    ) -> Request:
        """Tokenise the prompt, find its chunks and open them, and begin to load them.

        Parameters
        ----------
        loader, on_change, ahead
            As :meth:`.ServedRequest.plan` takes them.
        report : FusionReport
            Gets the chunks that were found, and the seconds of finding and opening them.
        span : context manager
            Traces that.
        provisional : bool
            Whether the chunks are not used before :meth:`count` says so.

        Returns
        -------
        Request
            What :attr:`opened` is now.

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        AbandonedPlanError
            If the request has ended, or begun anew, meanwhile.
        """
        attempt = self._attempt
        self._all_hung = self._all_hung or self._home.hung.is_dead
        opened = None
        try:
            with span:
                opened, count_uses = self._open(report, provisional=provisional)
            loading = RequestLoading(self._home.context, opened, self._recipe)
            load = None if loader is None else loading.begin(ahead=ahead, on_change=on_change)
            with self._publishing:
                if attempt != self._attempt or self.opened is not None:
                    raise AbandonedPlanError
                self.opened, self._loading, self._count_uses = opened, loading, count_uses
        except BaseException as error:
            if opened is not None:
                opened.close()
            if attempt == self._attempt:
                raise
            self._home.hung.discard((id(self), attempt))
            raise AbandonedPlanError from error
        if not provisional:
            # Whenever it is planned: a variant of it may have turned out to be damaged meanwhile.
            self._home.keep_variants(opened)
        if loader is not None and load is not None:
            loader.add(load)
        return opened

    def _open(self, report: FusionReport, *, provisional: bool) -> tuple[Request, Callable[[], None] | None]:
        """Return the planned prompt, and what counts a provisional one's uses later."""
        started_s = time.perf_counter()
        # One that begins anew uses its chunks once all the same.
        counted = not provisional and not self._is_counted
        self._read = self._read or self._home.read(self._prompt)
        opened = self._home.plan_served(self._read, self._recipe, report, counted=counted, skip=self._skips)
        self._is_counted = self._is_counted or counted
        count_uses = self._home.uses_of(opened, report) if provisional else None
        report.spend("align", started_s, time.perf_counter())
        return opened, count_uses

    def _skips(self, key: str) -> bool:
        """Whether a chunk's KV is not waited for any more."""
        return self._all_hung or key in self._hung_keys

    def count(self) -> None:
        """Count the uses of a provisional prompt's chunks, now that it was asked; others are counted already."""
        count_uses, self._count_uses = self._count_uses, None
        if count_uses is not None:
            self._is_counted = True
            count_uses()

    # -- loading ---------------------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """Whether a disk, or another machine, has not answered for a while."""
        if self._loading is not None:
            return self._loading.is_stuck or self._waits_in_vain
        return time.perf_counter() - self.asked_s > STUCK_S

    @property
    def is_hung(self) -> bool:
        """Whether what it waits for is to be given up, since nothing has come for so long."""
        most_s = self._home.limits.load_timeout_s
        if self._loading is None:
            return time.perf_counter() - self.asked_s > most_s
        return self._loading.stalled_s > most_s or self._waits_in_vain

    @property
    def _waits_in_vain(self) -> bool:
        return self._loading is not None and self._loading.is_idle and self._home.hung.is_dead

    def may_begin(self, *, alone: bool) -> bool:
        """Whether enough has been loaded, see :meth:`fused_kv_llm.online.RequestLoading.may_begin`."""
        return self._loading is None or self._loading.may_begin(alone=alone)

    def check(self, report: FusionReport) -> None:
        """Put into a report how long loading took.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turned out to be damaged.
        """
        loaded = None if self._loading is None else self._loading.check()
        if loaded is not None:
            report.spend("load", *loaded)

    def learn(self, compute_s: float) -> None:
        """Learn how long computing took, see :meth:`fused_kv_llm.online.RequestLoading.learn`."""
        if self._loading is not None:
            self._loading.learn(compute_s)

    # -- ends ------------------------------------------------------------------------------------------------

    def give_up(self, lost_key: str | None) -> None:
        """Do without the chunks that do not come from now on; the second time, without any that is not loaded.

        What is still planned or read is left to its threads.

        Parameters
        ----------
        lost_key : str or None
            The chunk that was waited for, if that is known.
        """
        keys = set() if self._loading is None else self._loading.hanging_keys
        keys |= set() if lost_key is None else {lost_key}
        self._all_hung = self._all_hung or not keys or bool(self._hung_keys)
        self._hung_keys |= keys
        opened, token = self.opened, (id(self), self._attempt)
        if opened is not None or self._loading is None:
            # A thread is left behind that plans, or reads.
            self._home.hung.add(token)
            if opened is not None:
                opened.on_closed = partial(self._home.hung.discard, token)

    def close(self) -> None:
        """Close what is open, and have what a thread still plans closed; the prompt may be planned again."""
        with self._publishing:
            self._attempt += 1
        self._loading = None
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()
