"""Server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .refusals import RefusedError, refusal_of

__all__ = ["EventResponse", "last_events", "unless_client_leaves"]

T = TypeVar("T")

CLIENT_LEFT = 499
_DONE = "data: [DONE]\n\n"
# Made once: it is used for every token.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class EventResponse(StreamingResponse):
    """A stream of events, ended by ``[DONE]``.

    An error after the first event is an event too, since the status has been sent.

    Parameters
    ----------
    chunks : async generator of dict
    entered : AsyncExitStack
        What to leave when the stream is over, or its client has left.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], entered: AsyncExitStack) -> None:
        self._entered = entered
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(chunks), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with self._entered:
            await super().__call__(scope, receive, send)


async def _events(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[str]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        yield last_events(refusal_of(error))
    else:
        yield _DONE


def last_events(refusal: RefusedError) -> str:
    """Return the events that end a stream which cannot go on: the error, and the end."""
    return _event(refusal.to_dict()) + _DONE


async def unless_client_leaves(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer, and end it if its client leaves.

    Raises
    ------
    RefusedError
        If the client has left, which nobody reads.
    """
    answering, leaving = asyncio.create_task(answer), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise RefusedError("The client has left", CLIENT_LEFT)
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {_ENCODER.encode(chunk)}\n\n"
