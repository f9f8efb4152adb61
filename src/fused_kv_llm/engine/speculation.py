"""Prompts that are proposed while a search goes on (dynamic speculative pipelining, RAGCache 5.3 and algorithm 2).

A proposal is loaded and computed up to its first token, and is held there. Whoever asks for the same prompt afterwards
gets it; a proposal that is not asked for is dropped, and nothing of it was seen. Prompts are compared as text, so it
does not matter which framework renders them.
"""

from __future__ import annotations

import threading
import time
from copy import deepcopy
from types import TracebackType
from typing import Self

from fused_kv_llm.config import GenerationConfig
from fused_kv_llm.decoding import Constraint
from fused_kv_llm.errors import PromptError
from fused_kv_llm.online import Recipe
from fused_kv_llm.prompt import Prompt, PromptRenderer, Rendered
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import RequestHandle, RequestHome, ServedRequest, StepLoop, Terms

__all__ = ["Speculation", "Speculations"]

# Between the end of a search and the prompt; a chain that has not asked by then has failed.
_UNASKED_S = 10.0


class Speculation:
    """What one search has proposed; a context manager, used by one thread.

    Made by :meth:`fused_kv_llm.FusedKVEngine.speculate`. Leaving the block without :meth:`finish`, or dropping the
    object, drops what was proposed.

    Parameters
    ----------
    speculations : Speculations
    recipe : Recipe
        How the prompts are fused.
    config : GenerationConfig
        Its `max_tokens` is the longest answer there will be room for.

    Attributes
    ----------
    final_text : str or None
        The rendered prompt that the search ended with.
    finished_s : float
        ``time.perf_counter()`` when it ended.
    """

    def __init__(self, speculations: Speculations, recipe: Recipe, config: GenerationConfig) -> None:
        self._all, self._recipe, self._config = speculations, recipe, config
        self._text: str | None = None
        self._request: ServedRequest | None = None
        self._begun_s = self._proposed_s = time.perf_counter()
        self._dropped, self._was_busy = 0, False
        self.final_text: str | None = None
        self.finished_s = float("inf")

    def propose(self, prompt: Prompt) -> bool:
        """Have a prompt loaded and computed that will probably be asked, in place of the one before.

        What both begin with is kept; chunks that were loaded stay loaded.

        Parameters
        ----------
        prompt : str or list of messages

        Returns
        -------
        bool
            Whether it is under way; False if the engine has other work.
        """
        self._all.loop.check_caller()
        if self._request is None and self._all.loop.is_busy:
            # While this thread renders a prompt, the steps of others wait for the interpreter.
            self._was_busy = True
            return False
        rendered = self._all.renderer.render(prompt)
        if rendered.text == self._text and self._request is not None and not self._request.is_dropped:
            return True
        self._replace(rendered)
        self._text, self._proposed_s = rendered.text, time.perf_counter()
        self._request = self._all.begin(prompt, self._recipe, self._config)
        self._was_busy |= self._request is None
        return self._request is not None

    def finish(self, prompt: Prompt) -> None:
        """Say what the search ended with, and will be asked now; another proposal than that is dropped.

        Parameters
        ----------
        prompt : str or list of messages
        """
        rendered = self._all.renderer.render(prompt)
        if rendered.text != self._text:
            self._replace(rendered)
        self.final_text, self.finished_s = rendered.text, time.perf_counter()
        if self._request is not None:
            self._request.expires_s = self.finished_s + _UNASKED_S
            self._all.wake()
        self._all.finished(self)

    def cancel(self) -> None:
        """Drop what was proposed and has not been asked."""
        self._replace()

    def take(
        self, recipe: Recipe, config: GenerationConfig, constraint: Constraint | None, terms: Terms
    ) -> RequestHandle | None:
        """Return the request that was proposed and is asked now; None if there is none that fits."""
        request = self._request
        if request is None:
            return None
        if recipe != self._recipe or config.max_tokens > self._config.max_tokens:
            self._replace()
            return None
        asked_s = time.perf_counter()
        report = request.report
        self.describe(report, hidden_s=self.finished_s - self._proposed_s)
        self._request = None
        if not self._all.loop.confirm(request, config, constraint, terms, asked_s):
            # It made way for others.
            self._was_busy = True
            return None
        return request.handle

    def describe(self, report: FusionReport, hidden_s: float | None = None) -> None:
        """Say in a request's report how its search was used: `hidden_s` seconds of it, or, with None, not at all."""
        report.search_s, report.speculations_dropped = self.finished_s - self._begun_s, self._dropped
        if hidden_s is not None:
            report.search_hidden_s = hidden_s
            report.speculation = "corrected" if self._dropped else "confirmed"
        else:
            report.speculation = "wrong" if self._dropped else "off" if self._was_busy else ""

    def _replace(self, successor: Rendered | None = None) -> None:
        """Drop what was proposed, but for what the prompt that comes in its place begins with too."""
        request, self._request, self._text = self._request, None, None
        if request is not None:
            self._dropped += 1
            self._all.loop.drop(request, () if successor is None else self._all.renderer.encode(successor).ids)

    def __enter__(self) -> Self:
        """Return the speculation."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop what was proposed, unless the search has ended."""
        if self.final_text is None:
            self.cancel()

    def __del__(self) -> None:
        """Drop what nobody can ask for any more."""
        if self._request is not None:
            self._replace()


class Speculations:
    """The searches of an engine that have ended, until their prompts are asked; thread-safe.

    Parameters
    ----------
    loop : StepLoop
    home : RequestHome
    renderer : PromptRenderer
    """

    def __init__(self, loop: StepLoop, home: RequestHome, renderer: PromptRenderer) -> None:
        self.loop, self.renderer, self._home = loop, renderer, home
        # Reentrant: the collector may drop a speculation while this thread holds it.
        self._lock = threading.RLock()
        self._finished: list[Speculation] = []

    def begin(self, prompt: Prompt, recipe: Recipe, config: GenerationConfig) -> ServedRequest | None:
        """Begin a provisional request; None if the engine has other work."""
        copied = prompt if isinstance(prompt, str) else deepcopy(prompt)
        request = ServedRequest(
            self._home, copied, recipe, config, None, Terms(), self.loop.cancel, provisional=True
        )  # fmt: skip
        if self.loop.submit_provisional(request):
            return request
        request.end()
        return None

    def finished(self, speculation: Speculation) -> None:
        """Remember a search that has ended."""
        with self._lock:
            self._forget_old()
            self._finished.append(speculation)

    def wake(self) -> None:
        """Have the loop look at the time."""
        self.loop.wake()

    def claim(
        self, prompt: Prompt, recipe: Recipe, config: GenerationConfig, constraint: Constraint | None, terms: Terms
    ) -> RequestHandle | Speculation | None:
        """Return what was proposed of a prompt that is asked now.

        Returns
        -------
        RequestHandle, Speculation or None
            The request, which goes on; the search without one that fits; or None for a prompt of no search.
        """
        if not self._finished:
            return None
        try:
            text = self.renderer.render(prompt).text
        except PromptError:
            return None
        with self._lock:
            self._forget_old()
            found = next((one for one in self._finished if one.final_text == text), None)
            if found is None:
                return None
            self._finished.remove(found)
        return found.take(recipe, config, constraint, terms) or found

    def _forget_old(self) -> None:
        now_s = time.perf_counter()
        self._finished = [one for one in self._finished if now_s - one.finished_s < _UNASKED_S]

    def close(self) -> None:
        """Forget everything; what is under way is given up by the loop."""
        with self._lock:
            self._finished.clear()
