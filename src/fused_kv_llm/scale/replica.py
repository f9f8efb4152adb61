"""A replica: an engine behind the server's application, and what it publishes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import EngineClosedError
from fused_kv_llm.server import create_app

from .forwarding import Call, answered_by
from .options import server_config
from .placement import RoutingKey
from .routing_keys import StoredHashes
from .routing_stats import ReplicaStats

__all__ = ["EngineReplica"]

# Hashes of chunks that are told at once: 20 bytes each.
_MOST_HASHES = 200_000


class EngineReplica:
    """Answers requests that a gateway forwards; nothing here needs Ray, which runs it as a deployment.

    Parameters
    ----------
    engine : dict
        Options of :class:`~fused_kv_llm.FusedKVEngine`.
    server : dict
        As :func:`.options.server_config` takes them.
    """

    def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        config = server_config(server)
        self.engine = FusedKVEngine(**engine)
        self._app = create_app(self.engine, config)
        self._stats = ReplicaStats()
        self._name = uuid.uuid4().hex
        self._begun: AsyncExitStack | None = None
        self._beginning = asyncio.Lock()
        self._publishing = asyncio.Lock()

    async def answer(self, call: Call, key: RoutingKey) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the ASGI messages of a request's response."""
        await self._begin()
        self._stats.answered(key)
        async for message in answered_by(self._app, call):
            yield message

    async def stored(self, after: Mapping[str, Mapping[str, int]]) -> tuple[str, dict[str, int], StoredHashes]:
        """Tell of stored chunks.

        Parameters
        ----------
        after : mapping
            By replica and identity, the last row of its store that the caller was told of.

        Returns
        -------
        str
            The replica's own name.
        dict of str to int
            What is to be under that name in the next call.
        tuple of numpy.ndarray
            Hashes and lengths, some hundred thousand at most: call again until there are none.
        """
        await self._begin()
        return (self._name, *await asyncio.to_thread(self._stored, dict(after.get(self._name, {}))))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what routers are to know of this replica; Ray Serve calls it again and again."""
        running, waiting = self.engine.requests.open
        async with self._publishing:
            return await asyncio.to_thread(lambda: self._stats.published(self._engines(), running, waiting))

    def check_health(self) -> None:
        """Make sure that the engine takes requests; Ray Serve replaces a replica that raises.

        Raises
        ------
        EngineClosedError
            If it is closed.
        """
        if self.engine.closed:
            raise EngineClosedError("The engine of this replica is closed.")

    async def close(self) -> None:
        """End the application, then the engine."""
        begun, self._begun = self._begun, None
        if begun is not None:
            await begun.aclose()
        await asyncio.to_thread(self.engine.close)

    async def _begin(self) -> None:
        async with self._beginning:
            if self._begun is None:
                begun = AsyncExitStack()
                await begun.enter_async_context(self._app.router.lifespan_context(self._app))
                self._begun = begun

    def _engines(self) -> Iterator[tuple[str, FusedKVEngine]]:
        own = self.engine.config.tenant
        for engine in self._app.state.fused_kv.tenants.engines():
            yield engine.config.tenant.removeprefix(own).removeprefix("/"), engine

    def _stored(self, after: dict[str, int]) -> tuple[dict[str, int], StoredHashes]:
        found, left = [], _MOST_HASHES
        for _, engine in self._engines():
            for rows in engine.store.content_hashes(engine.identity, after.get(engine.identity, 0)):
                found.append((rows.prefix[:left], rows.full[:left], rows.length[:left]))
                after[engine.identity] = int(rows.rowid[:left][-1])
                left -= len(found[-1][0])
                if left <= 0:
                    break
            if left <= 0:
                break
        none = np.empty(0, np.uint64)
        prefix = np.concatenate([none, *(one[0] for one in found)])
        full = np.concatenate([none, *(one[1] for one in found)])
        length = np.concatenate([np.empty(0, np.int64), *(one[2] for one in found)])
        return after, (prefix, full, length)
