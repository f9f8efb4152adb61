"""Whether an event loop runs on while something is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICK_S = 0.005


class Ticks:
    """Counts how often the loop came round."""

    count = 0


@asynccontextmanager
async def counted_ticks() -> AsyncIterator[Ticks]:
    """Count while the block runs; a loop that is blocked counts nothing."""
    ticks = Ticks()

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            ticks.count += 1

    ticking = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        ticking.cancel()
