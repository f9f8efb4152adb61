"""Work that goes on beside requests: chunks that prompts contained but the store did not, then preprocessing."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal

from fused_kv_llm.model import StoppedError

from .batches import PendingChunk
from .expected_chunks import ExpectedChunks
from .prefill import Ingestor
from .preprocess import Preprocessor
from .progress import PreprocessingCounts, progress_bar
from .variant_builder import PromptChunks, VariantBuilder

__all__ = ["BackgroundWork", "Preprocess"]

Preprocess = Literal["background", "wait", "later"]
"""When an ingestion has chunks preprocessed: beside requests, before it returns, or not yet."""

_REMEMBERED_PROMPTS = 64
_SHOWN_EVERY_S = 0.2

_log = logging.getLogger(__name__)


class BackgroundWork:
    """One thread that works beside requests.

    Missing chunks come first: they are ingested by the ordinary path, after the request that met them. Their KV is
    that behind the header. If the live prompt had the chunk there it is taken from what the prompt has left (see
    :class:`.AlternativePath`), otherwise computed from the chunk's text: captured elsewhere it would depend on the
    question and on the other chunks of that prompt.

    Parameters
    ----------
    ingestor : Ingestor
    preprocessor : Preprocessor or None
        Does the second pass of ingestion.
    variants : VariantBuilder or None
        Keeps chunks as they are in prompts.
    ingested : callable
        Called with the text of every chunk once it is stored, to add what a selector needs of it.
    preprocessed : callable
        Called with the key of every chunk once what preprocessing makes of it is stored, for the same.
    """

    def __init__(
        self,
        ingestor: Ingestor,
        preprocessor: Preprocessor | None,
        variants: VariantBuilder | None = None,
        ingested: Callable[[str], object] = lambda text: None,
        preprocessed: Callable[[str], object] = lambda key: None,
    ) -> None:
        self._variants, self._ingested, self._preprocessed = variants, ingested, preprocessed
        self._prompts: deque[PromptChunks] = deque(maxlen=_REMEMBERED_PROMPTS)
        self._contexts = 0
        self._similar: Iterator[PromptChunks] = iter(())
        self._ingestor = ingestor
        self._preprocessor = preprocessor
        self._expected = ExpectedChunks()
        self._missing: deque[str] = deque()
        self._counts = PreprocessingCounts()
        self._wanted = self._refresh = self._closed = self._was_fruitless = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        # There is one as long as there is something to do.
        self._thread: threading.Thread | None = None

    def expect(self, texts: Iterable[str]) -> None:
        """Remember chunks that have no KV; the oldest of too many are forgotten."""
        with self._changed:
            self._expected.add(texts)

    def forget(self, texts: Iterable[str]) -> None:
        """Expect chunks no more, and ingest none of those that wait for it: they have left the corpus."""
        with self._changed:
            gone = set(texts)
            self._expected.forget(gone)
            self._missing = deque(text for text in self._missing if text not in gone)

    def ingest_expected(self, prompt_text: str) -> None:
        """Queue every remembered chunk that a prompt contains verbatim; after `close` do nothing."""
        with self._changed:
            if present := self._expected.take(prompt_text):
                self._missing.extend(present)
                self._start()

    def complete(self, texts: Iterable[str]) -> None:
        """Do for chunks whose KV is stored already what follows an ingestion; after `close` do nothing."""
        with self._changed:
            self._missing.extend(texts)
            if self._missing:
                self._start()

    def keep_variants(self, prompt: PromptChunks) -> None:
        """Queue a prompt whose chunks are to be kept as they are in it; the oldest of too many is forgotten."""
        if self._variants is not None and len(prompt.segments) > 1:
            with self._changed:
                self._prompts.append(prompt)
                self._start()

    def preprocess(self, *, refresh: bool = False, contexts: int = 0) -> None:
        """Begin to preprocess all stored chunks that are not preprocessed yet; after `close` do nothing.

        Parameters
        ----------
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.
        contexts : int
            Behind how many contexts of similar chunks a chunk is kept as a variant, once it is preprocessed.
        """
        if self._preprocessor is not None:
            with self._changed:
                self._contexts = max(self._contexts, contexts)
                self._wanted, self._refresh = True, self._refresh or refresh
                self._start()

    def wait(self, *, progress: bool = False) -> PreprocessingCounts:
        """Return when there is nothing left to do.

        Parameters
        ----------
        progress : bool
            Whether to show a progress bar for the preprocessing.

        Returns
        -------
        PreprocessingCounts
            Of all preprocessing since there was last nothing to do.

        Raises
        ------
        FusedKVError
            What ended the preprocessing. That a missed chunk could not be ingested is only logged.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._counts.total_chunks > 0)
            counts = self._counts
        with progress_bar("Preprocessing chunks", counts, enabled=progress) as show, self._changed:
            while not self._changed.wait_for(lambda: self._thread is None, _SHOWN_EVERY_S):
                show()
            show()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return counts

    def close(self) -> None:
        """Finish the forward under way, write what was computed and stop; nothing is begun any more."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._is_stopping():
            self._counts, self._error = PreprocessingCounts(), None
            thread = threading.Thread(target=self._run, name="fused-kv-background", daemon=True)
            thread.start()
            # Only now: nobody may wait for a thread that could not be started. It waits for the lock that is held here.
            self._thread = thread
            # A thread that computes while the interpreter is taken down would crash it.
            atexit.register(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                text = self._missing.popleft() if self._missing else None
                prompt = None if text is not None else self._next_prompt()
                if self._is_stopping() or (text is None and prompt is None and not self._wanted):
                    self._thread = None
                    self._changed.notify_all()
                    atexit.unregister(self.close)
                    return
            if text is not None:
                self._ingest(text)
            elif prompt is not None and self._variants is not None:
                self._keep(self._variants, prompt)
            elif self._preprocessor is not None:
                self._preprocess(self._preprocessor)

    def _ingest(self, text: str) -> None:
        try:
            self._ingestor.run([text], progress=False)
            self._ingested(text)
        except Exception as error:  # whatever it is, the chunks behind it in the queue must not wait forever
            _log.warning("A chunk met in a prompt could not be ingested in the background: %s", error)
        else:
            self._wanted = self._preprocessor is not None

    def _next_prompt(self) -> PromptChunks | None:
        """Return a prompt whose chunks are to be kept next, one of a live request first; None if there is none."""
        if self._prompts:
            return self._prompts.popleft()
        return None if self._wanted else next(self._similar, None)

    def _keep(self, variants: VariantBuilder, prompt: PromptChunks) -> None:
        try:
            variants.run(prompt, self._is_held_up)
        except StoppedError:
            # Behind those of live requests, which are the newer ones.
            self._similar = chain([prompt], self._similar)
        except Exception as error:  # whatever it is, the prompts behind it in the queue must not wait forever
            _log.warning("The chunks of a prompt could not be kept as variants: %s", error)

    def _preprocess(self, preprocessor: Preprocessor) -> None:
        with self._changed:
            refresh, counts, contexts = self._refresh, self._counts, self._contexts
            self._wanted = self._refresh = False
            self._contexts = 0
        done = counts.chunks

        def interrupted() -> bool:
            may_be = counts.chunks > done or not self._was_fruitless
            return self._is_held_up() or (may_be and self._is_interrupted())

        try:
            plan = preprocessor.plan(interrupted, refresh=refresh)
            with self._changed:
                counts.total_chunks = counts.chunks + len(plan.chunks)
                counts.total_tokens = counts.tokens + sum(len(chunk.token_ids) for chunk in plan.chunks)
                counts.stale = plan.stale
                self._changed.notify_all()

            def written(chunk: PendingChunk, nbytes: int) -> None:
                counts.add(len(chunk.token_ids), nbytes)
                counts.refreshed += chunk.key in plan.refreshed
                self._follow(chunk.key)

            if contexts and self._variants is not None:
                # Made when nothing else is to be done; also of what is left if this is interrupted.
                self._similar = chain(self._similar, preprocessor.prompts(plan, contexts))
            counts.neighbour_tokens += preprocessor.run(plan, written, interrupted)
            self._was_fruitless = False
        except StoppedError:
            # A group that was interrupted begins anew: the next time it is done to its end.
            self._was_fruitless = counts.chunks == done
            with self._changed:
                self._wanted, self._refresh = True, self._refresh or refresh
                self._contexts = max(self._contexts, contexts)
        except Exception as error:
            if self._is_stopping():
                # Perhaps only because the interpreter is being taken down: what is left is done by a later call.
                _log.info("Preprocessing ended with an error while it was being stopped: %s", error)
            else:
                self._error = error
                _log.warning("Preprocessing stopped; the next build_kv_cache goes on from there: %s", error)

    def _follow(self, key: str) -> None:
        try:
            self._preprocessed(key)
        except Exception as error:  # whatever it is, the chunk is preprocessed, and others are to be
            _log.warning("What a selector needs of a preprocessed chunk was not stored: %s", error)

    def _is_interrupted(self) -> bool:
        # New chunks are similar to others, so what is left is planned again with them.
        return bool(self._missing) or self._wanted

    def _is_held_up(self) -> bool:
        """Whether a second pass is to end whatever it loses: missed chunks need not wait for others' first passes."""
        return self._is_stopping() or (bool(self._missing) and self._ingestor.first_passes.are_under_way)

    def _is_stopping(self) -> bool:
        return self._closed or not threading.main_thread().is_alive()
