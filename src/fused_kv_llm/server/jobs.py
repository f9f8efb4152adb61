"""Ingestion of documents beside requests: one thread that reads, splits, prefills and embeds, tenants in turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.offline import Embedder, corpus_vectors, first_passes_of

from .libraries import Libraries
from .library import Library
from .library_schema import ENDED, JobState, Owner
from .pins import Pins
from .reading import ReadingLimits, read_upload
from .refusals import RefusedError, refusal_of
from .stored_bytes import StoredBytes
from .tenants import Tenants
from .turns import Turns

__all__ = ["JobRunner"]

_CHUNKS_AT_ONCE = 8
_UNDER_WAY: tuple[JobState, ...] = ("queued", "parsing", "chunking", "prefilling", "embedding")
_RESUMABLE: tuple[JobState, ...] = ("failed", "cancelled", "interrupted")

_log = logging.getLogger(__name__)


class _Task(NamedTuple):
    owner: Owner
    job: str
    document: str


class _LeftError(Exception):
    """The job was cancelled, or its document deleted, or the server stops."""


class JobRunner:
    """Does jobs one after the other, tenants in turn: through the engine's own ingestion, between requests' steps.

    Parameters
    ----------
    tenants : Tenants
    libraries : Libraries
    stored : StoredBytes
        What each tenant may store.
    pins : Pins
    embedder : Embedder
        Makes the vectors by which chunks are retrieved.
    limits : ReadingLimits
        Of reading a document.
    max_waiting : int
        Most jobs of one tenant that wait.
    """

    def __init__(
        self,
        tenants: Tenants,
        libraries: Libraries,
        stored: StoredBytes,
        pins: Pins,
        embedder: Embedder,
        limits: ReadingLimits,
        max_waiting: int,
    ) -> None:
        self._tenants, self._libraries, self._stored, self._embedder = tenants, libraries, stored, embedder
        self._limits, self._pins = limits, pins
        self._waiting = Turns[_Task](max_waiting)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def check_room(self, owner: Owner) -> None:
        """Make sure that one more job of a tenant may wait.

        Raises
        ------
        RefusedError
            If too many do.
        """
        if self._waiting.is_full(owner.tenant):
            raise RefusedError("Too many documents wait to be ingested", 429, kind="rate_limit_error", code="jobs_full")

    def start(self, owner: Owner, job: str, document: str) -> None:
        """Have a queued job done; one that does not fit any more is left to be resumed."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="fused-kv-documents", daemon=True)
                self._thread.start()
        if not self._waiting.put(owner.tenant, _Task(owner, job, document)):
            with self._tenants.using(*owner) as engine, self._libraries.using(engine, owner) as library:
                library.move_job(job, "interrupted", among=_UNDER_WAY)

    def resume(self, library: Library, owner: Owner, job: str, document: str) -> bool:
        """Go on with a job that has failed or was cancelled or interrupted; False if there is nothing to go on with."""
        self.check_room(owner)
        if not library.move_job(job, "queued", among=_RESUMABLE):
            return False
        self.start(owner, job, document)
        return True

    @staticmethod
    def cancel(library: Library, job: str) -> bool:
        """Give up a job at its next step; False if it has ended already."""
        return library.move_job(job, "cancelled", among=_UNDER_WAY)

    def close(self) -> None:
        """Leave what is under way; it can be resumed."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        self._waiting.close()
        if thread is not None:
            thread.join()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            task = self._waiting.take()
            if task is None or self._closed.is_set():
                return
            try:
                with (
                    self._tenants.using(*task.owner) as engine,
                    self._libraries.using(engine, task.owner) as library,
                ):
                    one = _Ingestion(engine, library, task, self._stored, self._pins, self._embedder, self._closed)
                    one.run(self._limits)
            except Exception as error:  # whatever it is, the jobs behind it must not wait forever
                _log.error("A job could not be begun", exc_info=error)


class _Ingestion:
    """One job, from an upload to chunks that can be retrieved; what was done before is not done again."""

    def __init__(
        self,
        engine: FusedKVEngine,
        library: Library,
        task: _Task,
        stored: StoredBytes,
        pins: Pins,
        embedder: Embedder,
        closed: threading.Event,
    ) -> None:
        self._engine, self._library, self._task, self._stored = engine, library, task, stored
        self._pins, self._embedder, self._closed = pins, embedder, closed
        self._state: JobState = "queued"
        self._done = self._total = 0
        self._texts_stored: list[str] = []

    def run(self, limits: ReadingLimits) -> None:
        try:
            texts = self._texts(limits)
            # One first pass, however many calls, until the document can be retrieved: preprocessing waits for it.
            with first_passes_of(self._engine.model).under_way():
                self._prefill(texts)
                self._to("embedding")
                tenant = self._engine.config.tenant
                vectors = corpus_vectors(texts, self._embedder, self._vectors_path(), self._check, tenant=tenant)
                self._library.put_vectors(self._task.document, vectors)
            self._to("done")
        except _LeftError:
            self._drop_what_nobody_has()
        except Exception as error:  # what is no fault of the client's is told in the log only, as elsewhere
            self._to_failed(refusal_of(error).message)

    def _texts(self, limits: ReadingLimits) -> list[str]:
        document = self._library.document(self._task.document)
        content = self._library.content(self._task.document)
        if document is None:
            raise _LeftError
        if content is not None:
            self._to("parsing")
            texts = read_upload(content, document.suffix, limits, self._check)
            self._to("chunking")
            self._library.put_chunks(document.id, texts)
        return [chunk.text for chunk in self._library.chunks(document.id)]

    def _prefill(self, texts: Sequence[str]) -> None:
        self._total = len(texts)
        self._stored.check(self._engine, self._task.owner, texts)
        for begin in range(0, len(texts), _CHUNKS_AT_ONCE):
            self._done = begin
            self._to("prefilling")
            batch = texts[begin : begin + _CHUNKS_AT_ONCE]
            self._stored.check(self._engine, self._task.owner, batch)
            self._texts_stored += batch
            last = begin + _CHUNKS_AT_ONCE >= len(texts)
            self._engine.build_kv_cache(batch, preprocess="background" if last else "later", progress=False)
        self._done = len(texts)
        self._pins.pin_again(self._engine, self._library, self._task.document)

    def _vectors_path(self) -> Path | None:
        """Return where the engine's own second pass looks for the same vectors."""
        return None if self._engine.config.preprocessing == "none" else self._engine.store.kv_dir / "vectors.sqlite"

    def _to(self, state: JobState) -> None:
        """Note what is done next, unless it is to be left."""
        if self._closed.is_set() or not self._library.move_job(
            self._task.job, state, among=(self._state,), done=self._done, total=self._total
        ):
            raise _LeftError
        self._state = state

    def _to_failed(self, why: str) -> None:
        self._library.move_job(
            self._task.job, "failed", among=(self._state,), done=self._done, total=self._total, error=why
        )

    def _check(self) -> None:
        job = self._library.job(self._task.job)
        if self._closed.is_set() or job is None or job.state in ENDED:
            raise _LeftError

    def _drop_what_nobody_has(self) -> None:
        """Delete KV that was stored for a document which has been deleted meanwhile."""
        if self._texts_stored and self._library.document(self._task.document) is None:
            self._engine.delete_chunks(self._library.unused(self._texts_stored))
