"""Blocking calls and generators from asynchronous code, without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from typing import Any, TypeVar

__all__ = ["collect_in_thread", "in_thread", "iterate_in_threads"]

_T = TypeVar("_T")
_END = object()


async def in_thread(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a function in a worker thread, with the caller's context variables."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def collect_in_thread(pieces: Generator[_T]) -> list[_T]:
    """Take all items of a blocking generator in one worker thread.

    When the caller's task is cancelled, the generator is closed before its next item, so that an answer nobody waits
    for any more does not go on taking time.
    """
    abandoned = threading.Event()

    def collect() -> list[_T]:
        with closing(pieces):
            items = []
            for item in pieces:
                items.append(item)
                if abandoned.is_set():
                    break
            return items

    try:
        return await asyncio.to_thread(collect)
    except asyncio.CancelledError:
        abandoned.set()
        raise


async def iterate_in_threads(pieces: Generator[_T]) -> AsyncGenerator[_T]:
    """Take each item of a blocking generator in a worker thread.

    The generator is closed when the consumer stops early, also when its task is cancelled in the middle of a step.

    Yields
    ------
    object
        The generator's items.
    """
    turn = threading.Lock()  # held by the thread that is inside the generator

    def step() -> Any:
        with turn:
            return next(pieces, _END)

    def close() -> None:
        with turn:
            pieces.close()

    try:
        while True:
            item = await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(step)))
            if item is _END:
                return
            yield item
    finally:
        # A thread waits for a step that still runs: the event loop must not, and may end before it.
        if turn.locked():
            threading.Thread(target=close).start()
        else:
            close()
