"""Answers that begin no sooner than without reuse: the clock of who asks does not tell what others have asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError

__all__ = ["Padding", "padded"]

T = TypeVar("T")

_SHORTEST_S = 0.1
"""Shorter periods would be told apart by what tokenizing and waiting for a thread take."""


class Padding:
    """Says when an answer may begin.

    Parameters
    ----------
    engine : FusedKVEngine
        Its times are those of all tenants.
    factor : float or None
        How many times the estimated time of a full prefill; None does not pad.
    """

    def __init__(self, engine: FusedKVEngine, factor: float | None) -> None:
        self._engine, self._factor = engine, factor

    @property
    def is_on(self) -> bool:
        """Whether answers are padded."""
        return self._factor is not None

    def prepare(self) -> None:
        """Time prefills, unless the times are known or nothing is padded; to be called while nobody is answered.

        Raises
        ------
        ConfigError
            If there is nothing to time: the model's context is too short.
        """
        if not self.is_on:
            return
        self._engine.corpus.measure_cost()
        if self._engine.corpus.cost.seconds is None:
            raise ConfigError("ttft_padding: prefills of this model cannot be timed, its context is too short")

    def period_s(self, prompt_tokens: int) -> float | None:
        """Return the seconds of which an answer's beginning is a multiple; None without padding.

        It depends on the prompt's length and on the machine, and on nothing that others have done.
        """
        full_s = self._engine.corpus.cost.prefill_s(0, prompt_tokens)
        if self._factor is None or full_s is None:
            return None
        return max(_SHORTEST_S, self._factor * full_s)


async def padded(parts: AsyncGenerator[T], asked_s: float, period_s: float) -> AsyncGenerator[T]:
    """Yield the parts of an answer with their own pace, the first one a multiple of a period after the request.

    All of it is shifted: a first part that is held alone would have those behind it come in one burst, and its length
    would tell how long it was held. An error is held as a part is.

    Parameters
    ----------
    parts : async generator
    asked_s : float
        When the request came, by the event loop's clock.
    period_s : float
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[float, T | Exception | None]] = asyncio.Queue()

    async def pump() -> None:
        last: Exception | None = None
        try:
            async with aclosing(parts):
                async for part in parts:
                    arrived.put_nowait((loop.time(), part))
        except Exception as error:
            last = error
        arrived.put_nowait((loop.time(), last))

    task, shift_s = asyncio.create_task(pump()), None
    try:
        while True:
            at_s, part = await arrived.get()
            if shift_s is None:
                periods = max(1, math.ceil((at_s - asked_s) / period_s))
                shift_s = asked_s + periods * period_s - at_s
            await asyncio.sleep(at_s + shift_s - loop.time())
            if part is None:
                return
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
