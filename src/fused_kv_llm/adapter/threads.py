"""Blocking calls and generators from asynchronous code, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

__all__ = ["in_thread", "iterate_in_threads"]

_T = TypeVar("_T")
_END = object()


async def in_thread(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a function in a worker thread, with the caller's context variables."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def iterate_in_threads(pieces: Iterator[_T]) -> AsyncIterator[_T]:
    """Take each item of a blocking generator in a worker thread.

    The generator is closed when the consumer stops early, also when its task is cancelled in the middle of a step.

    Yields
    ------
    object
        The generator's items.
    """
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, pieces, _END))
            item = await asyncio.shield(step)
            if item is _END:
                return
            yield item
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            if step is None or step.done():
                close()
            else:
                # A generator cannot be closed while a thread is inside it.
                step.add_done_callback(lambda done: (done.exception(), close()) if not done.cancelled() else None)
