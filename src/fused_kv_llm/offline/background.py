"""Background ingestion of chunks that prompts contained but the store did not (``store_misses``)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterable

from .preprocess import Ingestor

__all__ = ["BackgroundIngestor"]

_REMEMBERED_TEXTS = 4096

_log = logging.getLogger(__name__)


class BackgroundIngestor:
    """Ingests missing chunks by the ordinary path, one thread, after the request that met them.

    KV is computed from the chunk's text, not captured from the live prompt: captured KV would depend on the
    question and on the other chunks of that prompt.

    Parameters
    ----------
    ingestor : Ingestor
    """

    def __init__(self, ingestor: Ingestor) -> None:
        self._ingestor = ingestor
        self._expected: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, texts: Iterable[str]) -> None:
        """Remember chunks that have no KV; the oldest of too many are forgotten."""
        with self._lock:
            for text in texts:
                self._expected[text] = None
                self._expected.move_to_end(text)
            while len(self._expected) > _REMEMBERED_TEXTS:
                self._expected.popitem(last=False)

    def ingest_expected(self, prompt_text: str) -> None:
        """Queue every remembered chunk that a prompt contains verbatim; after `close` do nothing."""
        with self._lock:
            if self._closed:
                return
            present = [text for text in self._expected if text and text in prompt_text]
            for text in present:
                del self._expected[text]
            if present and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="fused-kv-ingest", daemon=True)
                self._thread.start()
            for text in present:
                self._queue.put(text)

    def wait(self) -> None:
        """Return when the queue has been worked off."""
        self._queue.join()

    def close(self) -> None:
        """Finish the chunk under way, drop the rest and stop; later prompts queue nothing any more."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        while True:
            try:
                self._queue.get_nowait()
                self._queue.task_done()
            except queue.Empty:
                break
        self._queue.put(None)
        thread.join()

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._ingestor.run([text], check_stale=False, progress=False)
            except Exception as error:  # whatever it is, the chunks behind it in the queue must not wait forever
                _log.warning("A chunk met in a prompt could not be ingested in the background: %s", error)
            finally:
                self._queue.task_done()
        self._queue.task_done()
