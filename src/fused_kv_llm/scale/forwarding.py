"""A request on its way from a gateway to a replica, and an application answering it there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

__all__ = ["Call", "answered_by"]

# Parts of an answer that wait for whoever takes them.
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A whole HTTP request.

    Parameters
    ----------
    scope : dict
        The parts of its ASGI scope that travel.
    body : bytes
    """

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes) -> Call:
        """Make one of an ASGI scope."""
        names = (
            "http_version",
            "method",
            "scheme",
            "path",
            "raw_path",
            "query_string",
            "root_path",
            "client",
            "server",
        )
        return cls({**{name: scope.get(name) for name in names}, "headers": list(scope["headers"])}, body)

    @property
    def path(self) -> str:
        """The path without the prefix under which the application is mounted."""
        return str(self.scope["path"]).removeprefix(self.scope["root_path"] or "")

    def json(self) -> Mapping[str, Any]:
        """Return the object that the body is; an empty one if it is something else, or too deep to be read."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def to_scope(self) -> Scope:
        """Return an ASGI scope for it."""
        return {**self.scope, "root_path": self.scope["root_path"] or "", "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"}, "state": {}}  # fmt: skip


async def answered_by(app: ASGIApp, call: Call) -> AsyncGenerator[Message]:
    """Have an application answer, and yield its ASGI messages as they come; leaving ends the request.

    Raises
    ------
    Exception
        Whatever the application raises.
    """
    parts: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_PARTS)
    left, bodies = asyncio.Event(), [call.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(call.to_scope(), receive, parts.put)
        finally:
            # Whoever has left takes no more, and the queue may be full.
            if not left.is_set():
                await parts.put(None)

    task = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await task
    finally:
        left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
