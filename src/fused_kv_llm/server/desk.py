"""Everything about documents that routes ask for: libraries, jobs, and what is retrieved from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.offline import as_embedder

from .config import ServerConfig
from .jobs import JobRunner
from .libraries import Libraries
from .library import Library
from .library_schema import Owner
from .pins import Pins
from .reading import ReadingLimits
from .retrieval import Retrieval
from .stored_bytes import StoredBytes
from .tenants import Tenants

__all__ = ["DocumentDesk", "OpenLibrary"]

_log = logging.getLogger(__name__)


class OpenLibrary(NamedTuple):
    """The documents of who asks, and the engine that has their KV."""

    owner: Owner
    engine: FusedKVEngine
    library: Library


class DocumentDesk:
    """The documents of a server.

    Parameters
    ----------
    tenants : Tenants
    config : ServerConfig
    on_refused : callable
        Called with a tenant and ``stored_bytes`` when its documents would take more than they may.

    Attributes
    ----------
    limits : ReadingLimits
        Of reading an upload.
    libraries : Libraries
    pins : Pins
    jobs : JobRunner
    retrieval : Retrieval
    """

    def __init__(self, tenants: Tenants, config: ServerConfig, on_refused: Callable[[str, str], None]) -> None:
        self._tenants = tenants
        self.limits = ReadingLimits(
            chunk_chars=config.chunk_chars,
            max_pages=config.max_document_pages,
            max_chars=config.max_document_chars,
            memory_bytes=config.reading_bytes,
            cpu_s=config.reading_timeout_s,
            timeout_s=3.0 * config.reading_timeout_s,
        )
        embedder = as_embedder(tenants.default.config.embedder)
        self.libraries = Libraries(tenants, config.max_tenants, config.max_names)
        self.pins = Pins(self.libraries, config.max_pinned_share / max(1, len(config.api_keys)))
        self._stored = StoredBytes(self.libraries, config.quotas, on_refused)
        self.jobs = JobRunner(
            tenants, self.libraries, self._stored, self.pins, embedder, self.limits, config.max_waiting_jobs
        )
        self.retrieval = Retrieval(embedder)

    @contextmanager
    def open(self, owner: Owner, *, make: bool = False) -> Iterator[OpenLibrary]:
        """Give the documents of a tenant, whose engine stays open meanwhile.

        Parameters
        ----------
        owner : Owner
        make : bool
            Whether there is to be a library from now on, see :meth:`.Libraries.using`.

        Raises
        ------
        RefusedError
            If they cannot be opened.
        """
        with self._tenants.using(*owner) as engine, self.libraries.using(engine, owner, make=make) as library:
            yield OpenLibrary(owner, engine, library)

    def check_bytes(self, owner: Owner, nbytes: int = 0) -> None:
        """Make sure that a tenant may store more, or a document of so many bytes.

        Raises
        ------
        RefusedError
            If its documents take all that they may.
        """
        with self._tenants.using(*owner) as engine:
            self._stored.check(engine, owner, nbytes=nbytes)

    @asynccontextmanager
    async def swept(self, every_s: float, *others: Callable[[], object]) -> AsyncGenerator[None]:
        """Delete what has expired, and do other chores, again and again."""

        async def sweep() -> None:
            while True:
                for chore in (self.libraries.sweep, *others):
                    try:
                        await asyncio.to_thread(chore)
                    except Exception as error:  # the next sweep may work
                        _log.error("What has expired could not be deleted", exc_info=error)
                await asyncio.sleep(every_s)

        task = asyncio.create_task(sweep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Leave the jobs under way, which can be resumed, and close the libraries."""
        self.jobs.close()
        self.libraries.close()
